"""Documents to masked batches: sources, rows, masks, splits and collation."""

from harmonic_sft.data.bad_rows import SHOWN_REASONS, BadRows
from harmonic_sft.data.batches import (
    EpochSampler,
    LabeledRows,
    MaskedRows,
    PaddingCollator,
    PaddingFreeCollator,
)
from harmonic_sft.data.classification import (
    LabeledData,
    check_label_settings,
    load_labeled_data,
)
from harmonic_sft.data.loading import DataConfig, EvalConfig, LoadedData, load_data
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX, MaskConfig
from harmonic_sft.data.sources import Source
from harmonic_sft.data.streams import StreamedRows

__all__ = [
    "EVAL_EPOCH",
    "IGNORE_INDEX",
    "SHOWN_REASONS",
    "BadRows",
    "DataConfig",
    "EpochSampler",
    "EvalConfig",
    "LabeledData",
    "LabeledRows",
    "LoadedData",
    "MaskConfig",
    "MaskedRows",
    "PaddingCollator",
    "PaddingFreeCollator",
    "Source",
    "StreamedRows",
    "check_label_settings",
    "load_data",
    "load_labeled_data",
]
