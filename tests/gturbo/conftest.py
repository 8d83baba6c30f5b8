import pytest

from . import handmade


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory, monkeypatch):
    """Receipts go to a home of the test's own."""
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(params=handmade.ALL)
def made(request):
    """One hand-packed install of each kind."""
    return handmade.ALL[request.param]()
