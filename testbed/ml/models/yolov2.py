"""YOLOv2 (Redmon and Farhadi, "YOLO9000: Better, Faster, Stronger"), one unit for each of Darknet's layers.

Units are numbered like Darknet's layers, from 0, including pooling, routes and reorganisation. The last Darknet layer,
which decodes boxes, is not a unit: `testbed.ml.models.detection` decodes. Batch normalisation is folded into biases and
kernels when `testbed.ml.models.darknet` reads trained weights.
"""

from __future__ import annotations

from pydantic import Field

from testbed.common.part import ConfigModel
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.detection import Detector
from testbed.ml.models.layers import Conv2d, Layer, LeakyReLU, MaxPool2d, Reorganise
from testbed.ml.models.shapes import Shape

CLASSES = 80
"""Number of classes in COCO, the data set of the published weights; used for data without labels."""
STRIDE = 32
"""Height and width of a cell of the output's grid, in pixels of the input."""
ANCHORS = (
    (0.57273, 0.677385),
    (1.87446, 2.06253),
    (3.33843, 5.47434),
    (7.88282, 3.52778),
    (9.77052, 9.16828),
)
"""Width and height of each anchor in cells of the grid, as for the published weights."""
ROUTES = {25: (16,), 28: (27, 24)}
"""Index of a route -> indices of the units that it reads: features of unit 16, reorganised by unit 27, join unit 24."""

# fmt: off
COCO = (
    "person", "bicycle", "car", "motorbike", "aeroplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "sofa", "pottedplant", "bed", "diningtable", "toilet",
    "tvmonitor", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush"
)
# fmt: on
"""Names of the classes, in the order of Darknet's list."""

_POOL = MaxPool2d()
_ROUTE = None


def _conv_unit(channels: int, kernel: int) -> tuple[Layer, ...]:
    return (Conv2d(channels, kernel, padding=kernel // 2), LeakyReLU(0.1))


_UNITS = (
    _conv_unit(32, 3),
    _POOL,
    _conv_unit(64, 3),
    _POOL,
    _conv_unit(128, 3),
    _conv_unit(64, 1),
    _conv_unit(128, 3),
    _POOL,
    _conv_unit(256, 3),
    _conv_unit(128, 1),
    _conv_unit(256, 3),
    _POOL,
    _conv_unit(512, 3),
    _conv_unit(256, 1),
    _conv_unit(512, 3),
    _conv_unit(256, 1),
    _conv_unit(512, 3),
    _POOL,
    _conv_unit(1024, 3),
    _conv_unit(512, 1),
    _conv_unit(1024, 3),
    _conv_unit(512, 1),
    _conv_unit(1024, 3),
    _conv_unit(1024, 3),
    _conv_unit(1024, 3),
    _ROUTE,
    _conv_unit(64, 1),
    Reorganise(2),
    _ROUTE,
    _conv_unit(1024, 3),
)
"""The layers of each unit but the last: a convolution with its activation, a pooling, the reorganisation, or a route.
"""


class Yolov2Options(ConfigModel):
    """Options of YOLOv2."""

    threshold: float = Field(
        0.5, gt=0, le=1, description="minimum score of a reported box"
    )


def yolov2(options: Yolov2Options, shape: Shape, classes: int) -> Model:
    """Create YOLOv2, trained for images of 416x416 to 608x608; raises ValueError unless sides are multiples of 32."""
    has_colours = len(shape) == 3 and shape[0] == 3
    if not has_colours or any(side % STRIDE for side in shape[1:]):
        raise ValueError(
            f"the input needs three channels and sides that are multiples of {STRIDE}, such as 3x416x416"
        )
    units = [_name_unit(index, layers) for index, layers in enumerate(_UNITS)]
    # Without the names of other classes, labels are numbers.
    labels: tuple[str, ...] = COCO
    if classes != CLASSES:
        labels = tuple(f"class {index}" for index in range(classes))
    detector = Detector(ANCHORS, labels, options.threshold)
    (channels,) = detector.channels(classes)
    units.append((f"conv{len(units)}", (Conv2d(channels, 1),)))
    return chain("yolov2", shape, classes, units, ROUTES, detector)


def _name_unit(
    index: int, layers: tuple[Layer, ...] | Layer | None
) -> tuple[str, tuple[Layer, ...]]:
    """Return name and layers of a unit from the unit's index and entry in `_UNITS`."""
    if layers is None:
        return f"route{index}", ()
    if isinstance(layers, tuple):
        return f"conv{index}", layers
    kind = "pool" if isinstance(layers, MaxPool2d) else "reorg"
    return f"{kind}{index}", (layers,)
