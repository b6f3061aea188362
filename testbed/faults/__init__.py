"""What breaks, mends and changes while a run goes on: when, what it changes, what undoes it."""
