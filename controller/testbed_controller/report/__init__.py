"""A run for people: the table in the terminal, the HTML report, the comparison of runs."""
