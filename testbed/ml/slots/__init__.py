"""EdgePipe's timeslots, casts between super neurons, and missing casts, for methods driven by the clock.

A super neuron is the set of neurons that one device holds: some neurons of each layer of a group of layers. A cast is
one transmission to several devices, without acknowledgement.

`arrangement` divides the neurons of a network into super neurons, `mapping` maps super neurons to devices, `timeslots`
determines in which slot a device computes which layer of which batch, and `planner` makes a plan of these three. At run
time, `program` is the program of every device: `casts` exchanges the outputs and losses of neurons over lossy links,
`missing` is the hook for parts that did not arrive, `neurons` computes, `samples` feeds and tests, and `weights`
distributes the scenario's initial weights before the first slot and gathers weights after the last.
"""
