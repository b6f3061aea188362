"""EdgePipe's timeslots, casts between super neurons, and missing casts, for methods driven by the clock."""
