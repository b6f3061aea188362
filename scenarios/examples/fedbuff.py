"""FedBuff (Nguyen et al., 2022): the server merges weight changes as they arrive, whichever version they began with."""

from testbed.messaging.membership import Hello
from testbed.ml.rounds.client import send_difference
from testbed.ml.rounds.messages import Begin, Begun, Update
from testbed.ml.rounds.method import Hooks, RoundMethod
from testbed.ml.rounds.options import TransferOptions
from testbed.ml.rounds.server import GlobalModel, Trained, mean


class FedBuffOptions(TransferOptions):
    """Options of `FedBuff`."""

    buffer: int = 2
    """Number of changes merged into a new version; 1 is FedAsync (Xie et al., 2019)."""
    staleness: float = 0.5
    """Exponent a of the weight (1 + s) ** -a of a change that began s versions ago."""


def add_mean(state, trained, memory):
    """Merge a buffer: add the mean of its changes to the weights."""
    changes = mean(state, trained, memory)
    return {name: change + state[name] for name, change in changes.items()}


class FedBuff(RoundMethod[FedBuffOptions]):
    """Devices never wait for each other; a round is a version of the server's model."""

    name = "fedbuff"
    summary = "asynchronous federated learning with a buffer of changes"
    Options = FedBuffOptions

    def hooks(self, options):
        """Make devices send weight changes: weights of different versions cannot be averaged."""
        return Hooks(sent=send_difference)

    async def serve(self, mailbox, context):
        """Send a device the newest weights whenever the device starts or has sent a change."""
        device = mailbox.device
        options = context.problem.options
        model = GlobalModel(device, context, add_mean)
        version_of = {}
        """The version that each device is training from."""
        training_of = {}
        """The number of each device's training, which selects its next samples."""

        def begin(name):
            version_of[name] = model.rounds
            training_of[name] = training_of.get(name, -1) + 1
            begin_round = Begin(mailbox.configuration, training_of[name], model.state)
            mailbox.post(name, begin_round)

        def begin_after_restart(hello):
            # The loop below starts devices that were there before: a second start would cancel their training.
            if hello.incarnation > server_start:
                begin(hello.sender)

        mailbox.on(Hello, begin_after_restart)
        # A message that nobody takes would stay in the mailbox.
        mailbox.on(Begun, lambda _: None)
        server_start = device.now()
        start = server_start
        """Time of the last merge."""
        buffer = []
        for name in context.plan.details.clients:
            begin(name)
        while not model.finished:
            update = await mailbox.take(Update)
            age = model.rounds - version_of[update.sender]
            weight = (1 + age) ** -options.staleness
            change = {name: values * weight for name, values in update.state.items()}
            buffer.append(Trained(update.sender, update.samples, change, update.loss))
            if len(buffer) == options.buffer:
                await model.merge(buffer)
                await model.keep(start, buffer)
                await model.report()
                start = device.now()
                buffer = []
            begin(update.sender)
