"""Every message between the lead and the stages: kinds and fields in one place.

``configuration`` numbers the lead's arrangements of devices into stages; whoever gets a message of another than its
own ignores it. ``work`` is what a micro-batch is for: "train", "evaluate" or "infer"; ``batch`` counts the training
steps, or the batches of an evaluation or inference.

========== ============== ======================================================================================
kind       way            fields; tensors
========== ============== ======================================================================================
hello      any -> lead    incarnation: the program has started and holds nothing
probe      lead -> any    configuration: what is older is void; question (a number): answer it
alive      any -> lead    configuration and question (those of the probe), holds (the configuration it is a stage
                          of, given up now if lower than the probe's; 0 for none), incarnation, actions (done so far),
                          computing, overdue ({peer: seconds}), held (replicas: [[configuration, step, units], ...])
configure  lead -> stage  configuration, stages ([[device, first, last], ...]), steps (in all), given;
                          weights, buffers and momentum of the stage's units if given, else they come from the seed
configured stage -> lead  configuration, incarnation: ready for work
activation stage -> next  configuration, work, batch, micro, micros, samples (of the batch); inputs
labels     lead -> last   configuration, batch; labels of the whole batch
gradient   stage -> prev  configuration, batch, micro; gradient
loss       last -> lead   configuration, batch, loss: mean of the batch
output     last -> lead   configuration, work, batch; outputs
updated    first -> lead  configuration, batch: within one device, never on a link
state      stage -> lead  configuration, step (the next one), unit; its weights, buffers and momentum
========== ============== ======================================================================================

Asynchronous training adds these. Its configurations are prepared, then committed: ``configure`` brings, instead of
weights, the point to go on from (``made``: the configuration that made it, ``step``) and ``fetch`` ({device: units});
``configured`` says that all of it is here. An activation has ``first``, whether it begins a stretch of training; a
gradient has ``times``, the seconds of a batch of the stages from its sender's on, and ``loss``, and so has ``updated``:
there is no ``loss`` message.

========== ============== ======================================================================================
kind       way            fields; tensors
========== ============== ======================================================================================
fetch      stage -> any   configuration, made, step, units: send me these
unit       any -> stage   configuration, made, step, unit; its weights, buffers and momentum
commit     lead -> stage  configuration, keep ([[made, step], ...]): everybody has what it needs, begin; free all points
                          but these
end        stage -> next  configuration, batch: this batch and later ones do not come for now; finish the others
drained    stage -> lead  configuration, step: all updates before this step are done and none after it
replica    stage -> any   configuration, step, unit; its weights, buffers and momentum: keep them for me
replicated stage -> lead  configuration, step: whoever is to keep my units of this step has them
keep       lead -> stage  configuration, keep: as in commit, but later points stay too
measure    lead -> stage  configuration, target: measure your link to it
packet     stage -> peer  configuration; only its size matters
measured   stage -> lead  configuration, target, rate (bit/s on the wire; null: it takes no time)
========== ============== ======================================================================================
"""

from __future__ import annotations

HELLO = "hello"
PROBE = "probe"
ALIVE = "alive"
CONFIGURE = "configure"
CONFIGURED = "configured"
ACTIVATION = "activation"
LABELS = "labels"
GRADIENT = "gradient"
LOSS = "loss"
OUTPUT = "output"
UPDATED = "updated"
STATE = "state"
FETCH = "fetch"
UNIT = "unit"
COMMIT = "commit"
END = "end"
DRAINED = "drained"
REPLICA = "replica"
REPLICATED = "replicated"
KEEP = "keep"
MEASURE = "measure"
PACKET = "packet"
MEASURED = "measured"

TENSOR = "tensor"
"""Name of the tensor in messages that carry one."""

TRAIN = "train"
EVALUATE = "evaluate"
INFER = "infer"
