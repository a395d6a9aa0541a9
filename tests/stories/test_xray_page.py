"""The page of an X-ray in a browser: a script clicks through it."""
import json
import re
import shutil
import subprocess

import gluon_amp as amp
import mxnet as mx
import pytest
from mxnet.gluon import nn

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")
SCRIPT = """<script>
  const seen = {}, at = selector => document.querySelector(selector);
  const change = (element, value) => {
    element.value = value; element.dispatchEvent(new Event("input", {bubbles: true})); };
  const rowsOf = id => shown(parts[id]).map(nameOf);
  const red = () => shown(parts.backward).filter(row => row.broken).length;
  const text = selector => at(selector).textContent;
  (async () => {
    seen.before = [red(), !at(".overflow").hidden];
    const stepsOf = name => ["1", "2", "0"].map(value => {
      change(step, value);
      return [text("#steps output"), shown(parts.forward).find(row => nameOf(row) === name).bins];
    });
    seen.weights = [shown(parts.weights)];
    at("input[name=state][value='1']").click();
    seen.after = [red(), !at(".overflow").hidden];
    seen.weights.push(shown(parts.weights));
    seen.kept = [!at(".weights").hidden, stepsOf("net_dense0_fwd")];
    at("input[name=state][value='0']").click();
    seen.formats = {};
    for (const name of ["bfloat16", "float8_e4m3", "float16"]) {
      change(format, name);
      seen.formats[name] = shown(parts.forward).filter(row => row.bad).map(nameOf);
    }
    seen.steps = stepsOf("net_dense0_fwd");
    const button = [...document.querySelectorAll(".tree button")].find(
      b => b.textContent === "dense1");
    button.click();
    seen.module = rowsOf("forward");
    [...document.querySelectorAll(".tree button")].find(b => b.textContent === "dense1").click();
    seen.all = rowsOf("forward").length;
    const canvas = document.getElementById("forward"), box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new MouseEvent("click", {clientX: box.left + 20, clientY: box.top + 28}));
    await new Promise(done => setTimeout(done, 50));
    seen.clicked = [decodeURIComponent(location.hash), text("#selected a")];
    const link = [...document.querySelectorAll("td a")].find(a => a.textContent.includes("weight"));
    link.click();
    await new Promise(done => setTimeout(done, 50));
    seen.linked = [link.textContent, decodeURIComponent(location.hash.slice(1)),
                   text("#selected a")];
    at("#selected button").click();
    seen.closed = at("#selected").hidden;
    at(".copy").click();
    seen.copied = [String(getSelection()), text(".code pre")];
    document.title = JSON.stringify(seen);
  })();
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a network whose second layer overflows in its second batch."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4), nn.HybridLambda(lambda F, x: F.square(x), prefix="sq_"),
                nn.Dense(4, in_units=8))
    net.initialize(mx.init.Xavier())
    amp.convert(net)
    data = mx.nd.random.normal(shape=(16, 4))
    batches = [(data, mx.nd.arange(16) % 4), (data * 2 ** 10, mx.nd.arange(16) % 4)]
    folder = tmp_path_factory.mktemp("xray") / "out"
    return amp.xray(net, batches, mx.gluon.loss.SoftmaxCrossEntropyLoss()).save(folder)


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    clicked = folder / "page.html"
    with open(page, encoding="utf-8") as file:
        clicked.write_text(file.read().replace("</body>", SCRIPT), encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=3000", "--window-size=1280,1000", clicked.as_uri()],
        capture_output=True, text=True, timeout=100, check=True)
    return json.loads(re.search("<title>(.*?)</title>", done.stdout)[1].replace("&amp;", "&"))


def test_switch_shows_the_network_with_keep(seen):
    (before, said), (after, said_after) = seen["before"], seen["after"]
    assert before > after == 0
    assert (said, said_after) == (True, False)


def test_network_with_keep_has_its_weights_and_the_same_batches(seen):
    before, after = seen["weights"]
    shown, steps = seen["kept"]
    assert shown
    assert [row["tensor"] for row in after] == [row["tensor"] for row in before]
    assert [row["bins"] for row in after] == [row["bins"] for row in before]
    assert {row["format"] for row in before} == {"float16"}
    assert {row["format"] for row in after} == {"float16", "float32"}  # of a kept block
    assert steps == seen["steps"]


def test_formats_are_compared_on_one_look(seen):
    formats = seen["formats"]
    assert formats["bfloat16"] == []
    assert set(formats["float16"]) < set(formats["float8_e4m3"])


def test_axis_of_steps_shows_each_batch(seen):
    (first, small), (second, large), (every, both) = seen["steps"]
    assert (first, second, every) == ("0", "1", "all")

    def middle(bins):
        return sum(i * share for i, share in enumerate(bins)) / sum(bins)
    assert middle(large) - middle(small) == pytest.approx(10, abs=0.1)
    assert middle(small) < middle(both) < middle(large)


def test_module_selects_its_tensors(seen):
    assert seen["module"]
    assert all(name.startswith("net_dense1_") for name in seen["module"])
    assert seen["all"] > len(seen["module"])


def test_each_tensor_has_an_address(seen):
    address, said = seen["clicked"]
    assert said.startswith(f"{address[1:]} (")
    name, linked, said = seen["linked"]
    assert linked == name
    assert said.startswith(f"{name} (")
    assert seen["closed"]


def test_copy_button_selects_the_line(seen):
    selected, line = seen["copied"]
    assert selected == line
    assert line.startswith("amp.convert(net, keep=[")
