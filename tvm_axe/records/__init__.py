"""What was best: databases of measured candidates, where they came from, and the best of them applied."""

from tvm_axe.records.apply import apply_best, records_key
from tvm_axe.records.packing import Packing, split_packing

__all__ = ["Packing", "apply_best", "records_key", "split_packing"]
