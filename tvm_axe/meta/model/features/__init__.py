"""What the cost model is told of a candidate."""

from tvm_axe.meta.model.features.extractor import PER_STORE, AxeFeatures, context_for, own_names

__all__ = ["PER_STORE", "AxeFeatures", "context_for", "own_names"]
