"""Documents to masked batches. Importing this reads only the `data:` section, not `datasets`."""

from harmonic_sft.data.sections import (
    DataConfig,
    EvalConfig,
    MaskConfig,
    Source,
    check_label_settings,
)

__all__ = ["DataConfig", "EvalConfig", "MaskConfig", "Source", "check_label_settings"]
