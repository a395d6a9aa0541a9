import pytest
from gluon_amp import __version__
from gluon_amp.cli import main


def test_the_demo_ends_with_a_table(capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    main(["demo", "--epochs", "2"])
    lines = capsys.readouterr().out.splitlines()
    header, float32, float16 = (line.split() for line in lines)
    assert header[0] == "dtype"
    assert (float32[0], float16[0]) == ("float32", "float16")
    assert float(float16[1].rstrip("%")) > 80
    assert float32[3] == "1.00"
    whole, half = (int(row[4].replace(",", "")) for row in (float32, float16))
    assert 0.5 <= half / whole < 0.51


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"gluon-amp {__version__}"


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train"])
    assert "train" in capsys.readouterr().err
