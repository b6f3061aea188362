"""FedBuff (Nguyen et al., 2022): the server merges changes as they come, whatever version they began from."""

from testbed.messaging.membership import Hello
from testbed.ml.rounds.client import send_difference
from testbed.ml.rounds.messages import Begin, Begun, Update
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import TransferOptions
from testbed.ml.rounds.server import GlobalModel, Trained, mean


class FedBuffOptions(TransferOptions):
    """Options of `FedBuff`."""

    buffer: int = 2
    """Changes that make a version; 1: FedAsync (Xie et al., 2019)."""
    staleness: float = 0.5
    """A change of a version that is s versions old weighs (1 + s) to the power of minus this."""


def add_mean(state, trained, memory):
    """Return the weights with the mean of the changes added."""
    return {
        name: change + state[name]
        for name, change in mean(state, trained, memory).items()
    }


class FedBuff(RoundMethod[FedBuffOptions]):
    """Devices never wait for each other; a round is a version of the server's model."""

    name = "fedbuff"
    summary = "asynchronous federated learning with a buffer of changes"
    Options = FedBuffOptions

    def hooks(self, options):
        """Send what training has changed."""
        return Hooks(sent=send_difference)

    async def serve(self, mailbox, job):
        """Give each device the newest weights whenever it has sent a change, or has started."""
        options, device = job.problem.options, mailbox.device
        model, versions, given = GlobalModel(device, job, add_mean), {}, {}

        def begin(name):
            versions[name], given[name] = model.rounds, given.get(name, -1) + 1
            mailbox.post(name, Begin(mailbox.configuration, given[name], model.state))

        mailbox.on(
            Hello,
            lambda hello: begin(hello.sender) if hello.incarnation > start else None,
        )
        mailbox.on(Begun, lambda _: None)
        start, buffer = device.now(), []
        for name in job.plan.details.portions:
            begin(name)
        while not model.finished:
            update = await mailbox.take(Update)
            weight = (1 + model.rounds - versions[update.sender]) ** -options.staleness
            change = {name: values * weight for name, values in update.state.items()}
            buffer.append(Trained(update.sender, update.samples, change, update.loss))
            if len(buffer) == options.buffer:
                await model.merge(buffer)
                await model.keep(start, buffer)
                await model.report()
                start, buffer = device.now(), []
            begin(update.sender)
