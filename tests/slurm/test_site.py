import os
import tomllib
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from transom_hpc.base.errors import SiteError, UsageError
from transom_hpc.slurm.site import SiteConfig, load_site

SHIPPED = Path(__file__).parents[2] / "site_configs"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_default_says_what_holds_without_it() -> None:
    assert load_site("default") == SiteConfig()


def test_default_shows_every_key() -> None:
    text = (SHIPPED / "default.toml").read_text()
    for key in fields(SiteConfig):
        assert f"\n{key.name} = " in text or f"\n# {key.name} = " in text or f"\n[{key.name}]" in text


def test_what_default_shows_as_an_example_is_right(tmp_path: Path) -> None:
    lines = (SHIPPED / "default.toml").read_text().splitlines()
    examples = [line.removeprefix("# ") if " = " in line and line.startswith("# ") else line for line in lines]
    text = "\n".join(line for line in examples if line != "setup = []")
    (tmp_path / "mine.toml").write_text(text)
    site = load_site("mine")
    assert site.partition == "gpu"
    assert site.env == {"NCCL_DEBUG": "WARN"}
    assert site.sbatch == {"exclusive": True, "mem": "0"}


def test_lab() -> None:
    assert load_site("lab").partition == "main"


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_right_and_commented(path: Path) -> None:
    load_site(path.stem)
    assert path.read_text().startswith("# ")


def test_places_in_their_order(tmp_path: Path) -> None:
    folders = [tmp_path / "home/.config/transom/sites", tmp_path]
    for at, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lab.toml").write_text(f'partition = "place{at}"')
        assert load_site("lab").partition == f"place{at}"
    assert load_site("lab").sample_period_s == 2.0  # one file counts, alone
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/x.toml").write_text('account = "a"')
    assert load_site("deep/x.toml").account == "a"
    (tmp_path / "plain").write_text('account = "b"')
    assert load_site("plain").account == "b"


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"no site config 'nope'; there are default, lab, lab-plain\..*/etc/transom"):
        load_site("nope")
    with pytest.raises(SiteError, match="no site config './nope.toml'"):
        load_site("./nope.toml")
    with pytest.raises(SiteError):
        load_site("")
    with pytest.raises(SiteError):
        load_site(str(tmp_path) + "/")


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('partitoin = "x"', "partitoin", "did you mean 'partition'?"),
        ("sample_period = 2", "sample_period", "did you mean 'sample_period_s'?"),
        ("qqq = 1", "qqq", "the keys are partition, account"),
        ('signal_lead_s = "2 min"', "signal_lead_s", "Expected `int`, got `str`"),
        ("signal_lead_s = -1", "signal_lead_s", ">= 0"),
        ("silent_periods = true", "silent_periods", "Expected `int`, got `bool`"),
        ("silent_periods = 0", "silent_periods", ">= 1"),
        ("sample_period_s = 0", "sample_period_s", "> 0"),
        ("stripe_bytes = 1.5", "stripe_bytes", "Expected `int`, got `float`"),
        ("stripe_bytes = 5000", "stripe_bytes", "must be a power of two of at least 4096, not 5000"),
        ("data_files = 0", "data_files", ">= 1"),
        ('writer = "fast"', "writer", "Invalid enum value 'fast'"),
        ('signal = "FOO"', "signal", "no signal has the name 'FOO'"),
        ('partition = ""', "partition", "length >= 1"),
        ('setup = "module load"', "setup", "Expected `array`, got `str`"),
        ("setup = [1]", "setup[0]", "Expected `str`, got `int`"),
        ('[env]\nGOOD = "1"\nBAD = 1', "env.BAD", "Expected `str`, got `int`"),
        ("[sbatch]\nmem = 0\ngres = [1]", "sbatch.gres", "got `array`"),
        ("partition = ", "", "can't read"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(SiteError) as caught:
        load_site(str(path))
    assert str(path) in str(caught.value)
    assert key in str(caught.value)
    assert said in str(caught.value)
    assert (caught.value.path, caught.value.key) == (str(path), key)
    assert isinstance(caught.value, UsageError)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SiteError, match="can't read"):
        load_site("x")


def test_sig_prefix_is_as_good(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('signal = "SIGUSR2"')
    assert load_site("x").signal == "USR2"


def test_a_config_goes_through_json_and_back() -> None:
    site = load_site("lab")
    assert msgspec.json.decode(msgspec.json.encode(site), type=SiteConfig) == site


def test_the_packaged_files_are_found_from_any_folder() -> None:
    assert Path.cwd() != SHIPPED.parent
    assert tomllib.loads((SHIPPED / "lab.toml").read_text())["partition"] == load_site("lab").partition
    assert os.environ["HOME"] != str(Path("/root"))
