// The page of a trace: reads what blockdiff/plots/denoising.py writes into its `data`, and shows it in a player.

async function read() {
  const bytes = Uint8Array.from(atob(find("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function drawLegend(run) {
  find("most").textContent = `${run.most.toFixed(2)} nats`;
  const moments = run.requests.flatMap((each) => each.views).flatMap((each) => each.moments);
  const occurs = (bits) => moments.some((moment) => moment.flags.some(bits));
  find("legend-pinned").hidden = !occurs((flags) => flags & FLAGS.pinned);
  find("legend-stays").hidden = !occurs((flags) => flags & FLAGS.stays);
  find("legend-verified").hidden = !occurs((flags) => flags & (FLAGS.accepted | FLAGS.rejected | FLAGS.own));
  find("legend-wrong").hidden = !occurs((flags) => flags & FLAGS.wrong);
  find("legend-grid").hidden = !occurs((flags) => (flags & 3) === 3);
}

function say(words) {
  find("main").hidden = false;
  find("main").replaceChildren(words);
}

function start(run) {
  if (!run.requests.length) return say("Nothing was denoised.");
  find("main").hidden = false;
  find("left-out").textContent = `This page would be too large with everything. Left out: ${run.left_out}.`;
  find("left-out").hidden = !run.left_out;
  drawLegend(run);
  const player = new Player(find("main"), run), buttons = run.requests.map((each) => {
    const steps = each.views.reduce((sum, one) => sum + (one.steps ?? 0), 0);
    const button = make("button", { type: "button" }, `request ${each.id} `, make("small", { textContent: count(steps, "step") }));
    button.addEventListener("click", () => choose(each));
    return button;
  });
  const choose = (request) => {
    player.chooseRequest(request);
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", run.requests[place] === request));
  };
  find("requests").append(...buttons);
  find("requests").hidden = run.requests.length < 2;
  document.addEventListener("keydown", (event) => player.pressed(event));
  choose(run.requests.find((each) => each.views.length) ?? run.requests[0]);
  document.documentElement.dataset.ready = "yes";
  if (!window.matchMedia("(prefers-reduced-motion: reduce)").matches) player.play();
}

read().then(start, (error) =>
  say(`The data of this page cannot be read (${error.message}); it needs a browser of 2023 or newer.`));
