"""The pages of an X-ray and of a Monitor's file in a browser: scripts click through them."""
import json
from pathlib import Path

import gluon_amp as amp
import mxnet as mx
import pytest
from browser import IN_BROWSER, title_after
from gluon_amp.tools.cli import main
from mxnet.gluon import nn

pytestmark = [pytest.mark.long, IN_BROWSER]
START = """<script>
  const seen = {}, at = selector => document.querySelector(selector);
  const change = (element, value) => {
    element.value = value; element.dispatchEvent(new Event("input", {bubbles: true})); };
  const nameOf = row => row.tensor, rowsOf = id => shown(parts[id]).map(nameOf);
  const red = () => shown(parts.backward).filter(row => row.broken).length;
  const text = selector => at(selector).textContent;
  const tick = () => new Promise(done => setTimeout(done, 50));
  const click = (canvas, x, y) => {
    const box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new MouseEvent("click", {clientX: box.left + x, clientY: box.top + y})); };
"""
SCRIPT = START + """
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
    for (const name of ["bfloat16", "float16"]) {
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
    const drawn = () => Object.keys(places).filter(name => places[name][0] === at("#forward"))
      .sort((a, b) => places[a][1] - places[b][1]);
    seen.drawn = [drawn()];
    at("input[name=order][value=worst]").click();
    seen.drawn.push(drawn());
    at("input[name=order][value=place]").click();
    change(search, "dense1");
    seen.filtered = [drawn(), [...document.querySelectorAll(".tensors tbody tr")]
      .filter(row => !row.hidden).map(row => row.cells[0].textContent)];
    change(search, "");
    click(at("#forward"), 20, 28);
    await tick();
    seen.clicked = [decodeURIComponent(location.hash), text("#selected a")];
    const link = [...document.querySelectorAll("td a")].find(a => a.textContent.includes("weight"));
    link.click();
    await tick();
    seen.linked = [link.textContent, decodeURIComponent(location.hash.slice(1)),
                   text("#selected a")];
    [...document.querySelectorAll(".good a")].pop().click();  // the gradient that limits the scale
    await tick();
    seen.advised = [text(".good"), text("#selected a")];
    at("#selected button").click();
    seen.closed = at("#selected").hidden;
    at(".copy").click();
    seen.copied = [String(getSelection()), text(".code pre")];
    document.title = JSON.stringify(seen);
  })();
</script></body>"""


OF_MONITOR = START + """
  (async () => {
    const pixel = (canvas, x, y) => [...canvas.getContext("2d").getImageData(
      x * canvas.width / canvas.clientWidth, y * canvas.height / canvas.clientHeight, 1, 1).data];
    seen.title = text("h1");
    seen.columns = [at(".by-power").hidden, at(".by-step").hidden];
    at("input[name=columns][value=steps]").click();
    seen.columns.push(at(".by-power").hidden, at(".by-step").hidden);
    const canvas = at("#forward"), width = canvas.clientWidth;
    const rows = shown(parts.forward).sort((a, b) => a.place - b.place).map(nameOf);
    const down = 20 + 16 * rows.indexOf("net_dense1_fwd") + 8;
    const before = Math.min(320, width * 0.36), cell = (width - before) / data.numbers.length;
    seen.cells = data.numbers.map((_, i) => pixel(canvas, before + (i + 0.5) * cell, down));
    click(canvas, before + 2.5 * cell, down);
    await tick();
    seen.step = text("#steps output");
    seen.selected = [text("#selected a"), at("#history").clientHeight > 100];
    canvas.dispatchEvent(new PointerEvent("pointermove", {
      clientX: canvas.getBoundingClientRect().left + before + 2.5 * cell,
      clientY: canvas.getBoundingClientRect().top + down}));
    seen.tip = text(".tip");
    at("input[name=columns][value=powers]").click();
    seen.broken = shown(parts.forward).filter(row => row.broken).map(nameOf);
    change(format, "bfloat16");
    seen.in_bfloat16 = shown(parts.forward).filter(row => row.bad).map(nameOf);
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
    return in_browser(page, SCRIPT, tmp_path_factory.mktemp("browser"))


def in_browser(page, script, folder):
    """What a script sees on a page."""
    return json.loads(title_after(Path(page), script, folder, size="1280,1000"))


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
    assert formats["float16"]


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


def test_rows_are_ordered_by_computation_or_fault(seen):
    placed, worst = seen["drawn"]
    assert placed[0].startswith("data")
    assert worst[0].startswith("net_sq")
    assert sorted(placed) == sorted(worst)


def test_filter_selects_by_name(seen):
    drawn, listed = seen["filtered"]
    assert set() < set(drawn) < set(listed)  # the list has gradients, too
    assert all("dense1" in name for name in listed)


def test_each_tensor_has_an_address(seen):
    address, said = seen["clicked"]
    assert said.startswith(f"{address[1:]} (")
    name, linked, said = seen["linked"]
    assert linked == name
    assert said.startswith(f"{name} (")
    advice, said = seen["advised"]
    name = said.partition(" (")[0]
    assert name.startswith("gradient of ")
    assert f"({name})" in advice
    assert seen["closed"]


def test_copy_button_selects_the_line(seen):
    selected, line = seen["copied"]
    assert selected == line
    assert line.startswith("amp.convert(net, keep=[")


def test_steps_of_a_training_are_columns(tmp_path):
    """A Monitor's file, whose third observed step overflows in the second layer."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4), nn.Dense(4, in_units=8))
    net.initialize(mx.init.One())
    amp.convert(net)
    trainer = amp.Trainer(net.collect_params(), "sgd", {"learning_rate": 0}, loss_scale=8.0)
    with amp.Monitor(net, trainer, tmp_path / "a.jsonl", interval=10) as monitor:
        for step in range(40):
            with mx.autograd.record():
                x = mx.nd.full((16, 4), 3000 if step == 29 else 1)
                loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(x), mx.nd.arange(16) % 4)
            trainer.backward(loss)
            trainer.step(16)
            monitor.step()
    assert main(["xray", str(tmp_path / "a.jsonl")]) == 0
    seen = in_browser(tmp_path / "a.html", OF_MONITOR, tmp_path)
    assert seen["title"] == "X-ray of a.jsonl, steps 10 to 40"
    assert seen["columns"] == [False, True, True, False]
    one, two, three, four = seen["cells"]
    assert one == two == four != three
    assert three[0] > three[2]  # orange
    assert seen["step"] == "30"
    assert seen["selected"] == ["net_dense1_fwd (output, float16)", True]
    assert "net_dense1_fwd (output, float16), step 30" in seen["tip"]
    assert "not finite: 100 %" in seen["tip"]
    assert seen["broken"][0] == "net_dense1_fwd"
    assert seen["in_bfloat16"] == []
