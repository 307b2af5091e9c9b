"""Publishing: what a repo on the Hub holds, its card, and how it gets there."""

from harmonic_sft.hub.linear_export import export_linear
from harmonic_sft.hub.push import check_destination, check_model, push, upload
from harmonic_sft.hub.run_folder import Destination, Form, TrainedFolder, read_trained
from harmonic_sft.hub.staging import PushError, stage

__all__ = [
    "Destination",
    "Form",
    "PushError",
    "TrainedFolder",
    "check_destination",
    "check_model",
    "export_linear",
    "push",
    "read_trained",
    "stage",
    "upload",
]
