"""EdgePipe's timeslots, casts between super neurons and what is missing of them, for methods that go by the clock."""
