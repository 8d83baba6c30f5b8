import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Receipts go to a directory of the test's own."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TURBOSPARK_HOME", str(path))
    return path
