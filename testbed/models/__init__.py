"""Neural networks as chains of units."""

from testbed.models.catalog import CATALOG, create
from testbed.models.chain import Model, Unit

__all__ = ["CATALOG", "Model", "Unit", "create"]
