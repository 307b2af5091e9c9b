"""What the experiments' tests need."""

import pytest
import yaml

TRANSPORT = {"weight": 0.1, "loss": {"name": "wasserstein"}}
WASSERSTEIN = {"name": "sum", "terms": [{"loss": {"name": "harmonic"}}, TRANSPORT]}
ROWS = {
    "linear_ce": {"head": {"name": "linear"}, "h_exp": None, "loss": {"name": "cross_entropy"}},
    "dist_harmonic": {},
    "dist_knn_smoothing": {"loss": {"name": "knn_label_smoothing", "epsilon": 0.1}},
    "dist_wasserstein": {"loss": WASSERSTEIN},
    "rotation_dist": {"head": {"name": "rotation", "inner": {"name": "dist"}}},
}


@pytest.fixture(scope="session")
def family_file(tmp_path_factory, tiny_base, run_settings):
    """A family on the tiny base, of three steps a run."""
    folder = tmp_path_factory.mktemp("family")
    settings = run_settings(tiny_base, folder / "unused")
    settings["h_exp"] = {"start": -12.0, "end": -12.0}
    settings["training"] |= {"max_steps": 3, "save_strategy": "no"}
    del settings["training"]["save_steps"]
    (folder / "base.yaml").write_text(yaml.safe_dump(settings))
    sections = {"family": {"base": "base.yaml", "rows": ROWS}}
    (folder / "family.yaml").write_text(yaml.safe_dump(sections))
    return folder / "family.yaml"


@pytest.fixture(scope="session")
def family_runs(tmp_path_factory):
    """Where the runs of that family are, for all tests."""
    return tmp_path_factory.mktemp("runs")
