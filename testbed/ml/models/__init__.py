"""Neural networks as chains of units."""

from testbed.ml.models.catalog import CATALOG, create
from testbed.ml.models.chain import Model, Unit

__all__ = ["CATALOG", "Model", "Unit", "create"]
