"""What the experiments' tests need."""

import pytest
import torch
import yaml

HARMONIC = {"name": "harmonic"}
WASSERSTEIN = {
    "name": "sum",
    "terms": [{"loss": HARMONIC}, {"weight": 0.1, "loss": {"name": "wasserstein"}}],
}
ROTATION = {"name": "rotation", "inner": {"name": "dist"}}
H_EXP = {"start": -12.0, "end": -12.0}
SECTIONS = {  # head, h_exp and loss of files of the family
    "linear_ce": ({"name": "linear"}, None, {"name": "cross_entropy"}),
    "dist_harmonic": ({"name": "dist"}, H_EXP, HARMONIC),
    "dist_knn_smoothing": ({"name": "dist"}, H_EXP, {"name": "knn_label_smoothing"}),
    "dist_wasserstein": ({"name": "dist"}, H_EXP, WASSERSTEIN),
    "rotation_dist": (ROTATION, H_EXP, HARMONIC),
    "rotation_wasserstein": (ROTATION, H_EXP, WASSERSTEIN),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few kilobytes gain nothing from a second thread, and wait for it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def family_configs(tmp_path_factory, tiny_base, run_settings):
    """Files of the family's names, of 10 steps each on the tiny base."""
    folder = tmp_path_factory.mktemp("configs")
    for name, (head, h_exp, loss) in SECTIONS.items():
        settings = {**run_settings(tiny_base, folder / "unused"), "head": head, "loss": loss}
        settings["h_exp"] = h_exp
        if h_exp is None:
            del settings["h_exp"]
        settings["training"] = {
            **settings["training"],
            "max_steps": 10,
            "save_strategy": "no",
        }
        del settings["training"]["save_steps"]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder
