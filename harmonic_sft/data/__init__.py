"""Documents to masked batches. Importing this package does not import `datasets`."""

from harmonic_sft.data.sections import (
    DataConfig,
    EvalConfig,
    MaskConfig,
    Source,
    check_label_settings,
)

__all__ = ["DataConfig", "EvalConfig", "MaskConfig", "Source", "check_label_settings"]
