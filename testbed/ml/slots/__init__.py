"""EdgePipe's timeslots, casts between super neurons, and missing casts, for methods driven by the clock.

`arrangement` divides the neurons of a network into super neurons, `mapping` maps these to devices, `timeslots` says in
which slot a device computes which layer of which batch, and `planner` makes the plan of the three. At run time,
`program` is the program of every device: `casts` exchanges the outputs and losses of neurons over lossy links,
`missing` is the hook for parts that did not arrive, `neurons` computes, `samples` feeds and tests, and `weights`
distributes given weights before the first slot and gathers weights after the last.
"""
