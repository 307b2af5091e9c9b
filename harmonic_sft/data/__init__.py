"""Documents to masked batches: sources, rows, masks, splits and collation."""

from harmonic_sft.data.classification import (
    LabelCollator,
    LabeledData,
    LabeledRows,
    check_label_settings,
    load_labeled_data,
)
from harmonic_sft.data.formats import BLANK
from harmonic_sft.data.loading import DataConfig, EvalConfig, LoadedData, load_data
from harmonic_sft.data.masked_dataset import (
    EpochSampler,
    MaskedRows,
    PaddingCollator,
    PaddingFreeCollator,
)
from harmonic_sft.data.masking import EVAL_EPOCH, IGNORE_INDEX, MaskConfig
from harmonic_sft.data.sources import Source
from harmonic_sft.data.streams import StreamedRows

__all__ = [
    "BLANK",
    "EVAL_EPOCH",
    "IGNORE_INDEX",
    "DataConfig",
    "EpochSampler",
    "EvalConfig",
    "LabelCollator",
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
