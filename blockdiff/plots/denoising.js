"use strict";
// Draws the moments that blockdiff/plots/denoising.py writes. Texts of data become text nodes, never markup.
// A page of a trace reads them from its `data`. In a live page `data` is empty: its script calls `start` with requests
// whose views are empty, and then `receive` with each new moment.

const STATES = ["noise", "guess", "committed", "given"]; // the lowest two bits of a cell's flags
const FLAGS = { kept: 4, changed: 8, wrong: 16, pinned: 32, stays: 64, renewed: 128 };
const MILLISECONDS = 700; // from one step to the next while playing

let run; // the data of the page
let request, view; // what is shown of it
let at = 0; // which moment
let position = 0; // which cell the arrow keys are at
let timer = null;
let isSeen = false; // whether the canvas shows what the step saw

const find = (id) => document.getElementById(id);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

async function read() {
  const bytes = Uint8Array.from(atob(find("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// One cell of a moment.

const textAt = (list, place) => (list && list[place] >= 0 ? run.texts[list[place]] : null);
const has = (moment, place, flag) => (moment.flags[place] & FLAGS[flag]) !== 0;
const stateOf = (moment, place) => STATES[moment.flags[place] & 3];
const entropyOf = (moment, place) => (moment.entropy && moment.entropy[place] >= 0 ? moment.entropy[place] / 1000 : null);
const shownText = (moment, place) =>
  (isSeen && stateOf(moment, place) === "guess" ? textAt(moment.seen, place) : textAt(moment.text, place)) ?? "·";

function classesOf(moment, place) {
  const marks = Object.keys(FLAGS).filter((flag) => has(moment, place, flag));
  return ["c", `state-${stateOf(moment, place)}`, ...marks].join(" ");
}

function noteOf(moment, place) {
  const text = textAt(moment.text, place), entropy = entropyOf(moment, place), state = stateOf(moment, place);
  const words = [`position ${place + 1}: ${state === "guess" ? "the guess is " : `${state} `}“${text ?? "·"}”`];
  if (entropy !== null) words.push(`entropy ${entropy.toFixed(3)} nats`);
  const seen = textAt(moment.seen, place), sample = textAt(moment.sample, place);
  if (seen !== null) words.push(`the step saw “${seen}” here`);
  if (has(moment, place, "kept")) words.push(sample === null ? "kept" : `kept as “${sample}”, the token that was drawn`);
  if (has(moment, place, "pinned")) words.push("pinned");
  if (has(moment, place, "stays")) words.push("stands as it was");
  if (has(moment, place, "renewed")) words.push("renewed");
  if (has(moment, place, "changed")) words.push("changed since the step before");
  if (has(moment, place, "wrong")) words.push("contradicts a given");
  return words.join(", ");
}

function dress(cell, moment, place) {
  const entropy = entropyOf(moment, place);
  cell.textContent = shownText(moment, place);
  cell.className = [classesOf(moment, place), ...(cell.dataset.edges ?? "").split(" ")].join(" ").trim();
  cell.style.setProperty("--heat", entropy === null ? 0 : Math.min(1, entropy / run.most).toFixed(3));
  cell.setAttribute("aria-label", noteOf(moment, place));
  cell.title = noteOf(moment, place);
}

function edgesOf(place, side) {
  const box = Math.sqrt(side), row = Math.floor(place / side), column = place % side;
  const isInner = (n) => n % box === box - 1 && n !== side - 1;
  return [isInner(column) ? "right" : "", isInner(row) ? "below" : ""].join(" ").trim();
}

function square(element, side) {
  element.classList.add("square");
  element.classList.toggle("nine", side === 9);
  element.style.gridTemplateColumns = `repeat(${side}, max-content)`;
}

// What is shown of a view: its canvas, numbers, map, and all of its steps.

function layOut() {
  const stage = find("stage"), last = view.moments.at(-1), side = view.side;
  stage.replaceChildren();
  stage.className = "";
  stage.style.gridTemplateColumns = "";
  if (side) square(stage, side);
  last.flags.forEach((_, place) => {
    const cell = make("button", { type: "button", tabIndex: -1 });
    cell.dataset.place = place;
    if (side) cell.dataset.edges = edgesOf(place, side);
    else { // a cell is as wide as the text that ends up there, so that nothing moves from step to step
      const text = textAt(last.text, place) ?? "";
      cell.style.width = `calc(${Math.max(3, Math.min(24, [...text].length))}ch + 16px)`;
    }
    stage.append(cell);
    if (!side && (textAt(last.text, place) ?? "").includes("⏎")) stage.append(make("span", { className: "break" }));
  });
  position = 0;
}

const cells = () => [...find("stage").querySelectorAll(".c, button")];

function draw() {
  const moment = view.moments[at], all = cells(), length = moment.flags.length;
  all.forEach((cell, place) => dress(cell, moment, place));
  all.forEach((cell, place) => (cell.tabIndex = place === position ? 0 : -1));
  const slider = find("slider");
  slider.max = view.moments.length - 1;
  slider.value = at;
  find("where").textContent = moment.name;
  slider.setAttribute("aria-valuetext", `${moment.name}, ${at + 1} of ${view.moments.length}`);
  const counts = Object.fromEntries(Object.keys(FLAGS).map((flag) => [flag, 0]));
  for (let place = 0; place < length; place++) for (const flag in FLAGS) counts[flag] += has(moment, place, flag);
  const entropies = (moment.entropy ?? []).filter((entropy) => entropy >= 0);
  const words = [moment.name];
  if (entropies.length) {
    words.push(`mean entropy ${(entropies.reduce((a, b) => a + b) / entropies.length / 1000).toFixed(2)} nats`);
    words.push(`${counts.kept} of ${length} kept`, `${counts.renewed} renewed`);
    const given = moment.flags.filter((flags) => STATES[flags & 3] === "given").length;
    if (given) words.push(`${given} given by the puzzle`);
    if (counts.pinned) words.push(`${counts.pinned} pinned`);
    if (counts.stays) words.push(`${counts.stays} stand as they were`);
    words.push(`${counts.changed} changed`, `temperature ${moment.detail.split("T ").at(-1)}`);
  } else words.push(moment.detail);
  find("numbers").textContent = words.join(" · ");
  find("note").textContent = noteOf(moment, position);
  drawMap();
}

function drawMap() {
  if (!view) return;
  const map = find("map"), moments = view.moments, length = moments[0].flags.length;
  const width = map.clientWidth || 400, scale = window.devicePixelRatio || 1, left = 78, right = 60;
  const high = Math.max(5, Math.min(22, Math.floor(420 / moments.length))), wide = (width - left - right) / length;
  map.width = width * scale;
  map.height = high * moments.length * scale;
  map.style.height = `${high * moments.length}px`;
  map.setAttribute("aria-label", summary());
  const pen = map.getContext("2d"), colours = getComputedStyle(document.documentElement);
  const colour = (name) => colours.getPropertyValue(`--${name}`).trim();
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  moments.forEach((moment, row) => {
    const top = row * high, gap = high > 8 ? 1 : 0;
    let kept = 0;
    moment.flags.forEach((flags, place) => {
      const entropy = entropyOf(moment, place), x = left + place * wide;
      pen.fillStyle = flags & FLAGS.pinned || stateOf(moment, place) === "given" ? colour("given") : colour("cell");
      pen.fillRect(x, top, wide - Math.min(1, wide / 4), high - gap);
      if (entropy !== null) {
        pen.fillStyle = `rgba(${colour("hot")}, ${Math.min(1, entropy / run.most)})`;
        pen.fillRect(x, top, wide - Math.min(1, wide / 4), high - gap);
      }
      if (has(moment, place, "kept") || stateOf(moment, place) === "committed") {
        pen.fillStyle = colour("sure");
        pen.fillRect(x, top + high - gap - Math.max(2, high / 6), wide - Math.min(1, wide / 4), Math.max(2, high / 6));
        kept += 1;
      }
    });
    pen.fillStyle = colour(row === at ? "ink" : "soft");
    if (high > 9 || row === at || row % 5 === 0) pen.fillText(moment.name, 6, top + high / 2);
    if (moment.entropy) {
      pen.fillStyle = colour("sure");
      pen.fillRect(width - right + 6, top + high / 4, (right - 12) * (kept / length), high / 2);
    }
    if (row === at) {
      pen.strokeStyle = colour("mark");
      pen.lineWidth = 2;
      pen.strokeRect(1, top + 1, width - 2, high - 2);
    }
  });
}

function summary() {
  const rows = view.moments.filter((moment) => moment.entropy).map((moment) => {
    const known = moment.entropy.filter((entropy) => entropy >= 0);
    const mean = known.reduce((a, b) => a + b, 0) / Math.max(1, known.length) / 1000;
    return `${moment.name} ${mean.toFixed(2)}`;
  });
  return `mean entropy in nats by step: ${rows.join(", ")}`;
}

function drawAll() {
  const strip = find("strip");
  strip.replaceChildren();
  if (!find("all").open) return;
  const cellOf = (moment, place) => {
    const cell = make("span", {});
    if (view.side) cell.dataset.edges = edgesOf(place, view.side);
    dress(cell, moment, place);
    return cell;
  };
  if (view.side) {
    const figures = view.moments.map((moment) => {
      const grid = make("div", { className: "small" }, ...moment.flags.map((_, place) => cellOf(moment, place)));
      square(grid, view.side);
      return make("figure", {}, grid, make("figcaption", { textContent: moment.name }));
    });
    strip.append(make("div", { className: "strip" }, ...figures));
    return;
  }
  const rows = view.moments.map((moment) =>
    make("tr", {}, make("th", { scope: "row", textContent: moment.name }),
      ...moment.flags.map((_, place) => make("td", {}, cellOf(moment, place)))));
  strip.append(make("table", {}, make("tbody", {}, ...rows)));
}

// Going from one to another.

function go(moment) {
  if (!view) return; // a live page, before the first moment
  at = Math.max(0, Math.min(view.moments.length - 1, moment));
  draw();
}

function choose(newView) {
  view = newView;
  [...find("views").children].forEach((button, place) => button.setAttribute("aria-pressed", request.views[place] === view));
  layOut();
  go(0);
  drawAll();
}

function chooseRequest(newRequest) {
  pause();
  request = newRequest;
  [...find("requests").children].forEach((button, place) => button.setAttribute("aria-pressed", run.requests[place] === request));
  for (const part of ["prompt", "text", "control"]) find(part).textContent = request[part];
  find("control-part").hidden = !request.control;
  view = undefined;
  drawViews();
  if (request.views.length) choose(request.views[0]);
}

function drawViews() {
  const canvases = request.views.filter((each) => each.steps !== undefined);
  const most = Math.max(1, ...canvases.map((each) => each.limit ?? each.steps));
  find("views").replaceChildren(...request.views.map((each) => {
    const button = make("button", { type: "button" }, each.name);
    if (each.steps !== undefined) {
      const isAtLimit = each.limit !== null && each.steps >= each.limit;
      const words = count(each.steps, "step") + (isAtLimit ? ", the limit: it did not converge" : "");
      const bar = make("span", { className: isAtLimit ? "full" : "" });
      bar.style.width = `${(100 * each.steps) / most}%`;
      button.append(" ", make("small", { textContent: words }), make("span", { className: "bar" }, bar));
    }
    button.setAttribute("aria-pressed", each === view);
    button.addEventListener("click", () => { pause(); choose(each); });
    return button;
  }));
}

function play() {
  if (at === view.moments.length - 1) go(0);
  timer = setInterval(() => (at === view.moments.length - 1 ? pause() : go(at + 1)), MILLISECONDS);
  find("play").textContent = "❚❚ pause";
  find("numbers").setAttribute("aria-live", "off"); // a screen reader would not keep up
}

function pause() {
  clearInterval(timer);
  timer = null;
  find("play").textContent = "▶ play";
  find("numbers").setAttribute("aria-live", "polite");
}

function moveTo(place) {
  position = Math.max(0, Math.min(view.moments[at].flags.length - 1, place));
  draw();
  cells()[position].focus();
}

function pressed(event) {
  if (!view || event.ctrlKey || event.altKey || event.metaKey) return;
  const target = event.target, inStage = find("stage").contains(target), isSlider = target === find("slider");
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key], down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const canvas = { PageUp: -1, PageDown: 1 }[event.key];
  if (inStage && (across || down)) moveTo(position + (across ?? down * columns()));
  else if (inStage && event.key === "Escape") find("slider").focus();
  else if (isSlider && (across || down || event.key === "Home" || event.key === "End")) return pause(); // it moves itself
  else if (across) { pause(); go(at + across); }
  else if (event.key === "Home" || event.key === "End") { pause(); go(event.key === "Home" ? 0 : Infinity); }
  else if (canvas) { pause(); choose(request.views[(request.views.indexOf(view) + canvas + request.views.length) % request.views.length]); }
  else if (event.key === " " && !target.closest("button, summary")) timer === null ? play() : pause();
  else return undefined;
  event.preventDefault();
}

function columns() {
  if (view.side) return view.side;
  const all = cells(), top = all[0].offsetTop, next = all.findIndex((cell) => cell.offsetTop > top);
  return next < 0 ? all.length : next;
}

function drawLegend() {
  find("most").textContent = run.most.toFixed(2);
  const moments = run.requests.flatMap((each) => each.views).flatMap((each) => each.moments);
  const occurs = (bits) => moments.some((moment) => moment.flags.some(bits));
  find("legend-pinned").hidden = !occurs((flags) => flags & FLAGS.pinned);
  find("legend-stays").hidden = !occurs((flags) => flags & FLAGS.stays);
  find("legend-wrong").hidden = !occurs((flags) => flags & FLAGS.wrong);
  find("legend-grid").hidden = !occurs((flags) => (flags & 3) === 3);
}

function start(data) {
  run = data;
  find("left-out").textContent = `This page would be too large with everything. Left out: ${run.left_out}.`;
  find("left-out").hidden = !run.left_out;
  drawLegend();
  find("requests").append(...run.requests.map((each) => {
    const steps = each.views.reduce((sum, one) => sum + (one.steps ?? 0), 0);
    const button = make("button", { type: "button" }, `request ${each.id} `, make("small", { textContent: count(steps, "step") }));
    button.addEventListener("click", () => chooseRequest(each));
    return button;
  }));
  find("requests").hidden = run.requests.length < 2;
  find("main").hidden = false;
  const step = (change) => () => { pause(); go(at + change); };
  for (const [id, change] of [["first", -Infinity], ["back", -1], ["next", 1], ["last", Infinity]])
    find(id).addEventListener("click", step(change));
  find("play").addEventListener("click", () => (timer === null ? play() : pause()));
  find("slider").addEventListener("input", (event) => { pause(); go(Number(event.target.value)); });
  for (const [id, seen] of [["guess", false], ["seen", true]])
    find(id).addEventListener("click", () => {
      isSeen = seen;
      find("guess").setAttribute("aria-pressed", !seen);
      find("seen").setAttribute("aria-pressed", seen);
      draw();
    });
  find("stage").addEventListener("click", (event) => {
    const cell = event.target.closest("button");
    if (cell) moveTo(Number(cell.dataset.place));
  });
  find("map").addEventListener("click", (event) => {
    pause();
    go(Math.floor((event.offsetY / find("map").clientHeight) * view.moments.length));
  });
  find("all").addEventListener("toggle", drawAll);
  document.addEventListener("keydown", pressed);
  window.addEventListener("resize", drawMap);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
  chooseRequest(run.requests.find((each) => each.views.length) ?? run.requests[0]);
  document.documentElement.dataset.ready = "yes";
}

// One more moment of a running request, and the text so far: `facts` are those of the moment's view (a view with another
// name begins a new one), `texts` are new ones behind those that the page has. Who looks at the last moment goes on with it.
function receive(number, facts, moment, { texts = [], text, most = 0 } = {}) {
  const of = run.requests[number], isNew = of.views.at(-1)?.name !== facts.name;
  const follows = request === of && timer === null && (!view || (view === of.views.at(-1) && at === view.moments.length - 1));
  run.texts.push(...texts);
  run.most = Math.max(run.most, most);
  of.text = text ?? of.text;
  if (isNew) of.views.push({ ...facts, moments: [] });
  const last = Object.assign(of.views.at(-1), facts);
  last.moments.push(moment);
  drawLegend();
  if (request !== of) return;
  find("text").textContent = of.text;
  drawViews();
  if (view === last) {
    const place = position;
    layOut(); // the newest moment decides how wide the cells are
    position = place;
  } else if (follows) choose(last);
  go(follows ? Infinity : at);
  drawAll();
}

function say(words) {
  find("main").hidden = false;
  find("main").replaceChildren(words);
}

function show(data) {
  if (!data.requests.length) return say("Nothing was denoised.");
  start(data);
  if (!window.matchMedia("(prefers-reduced-motion: reduce)").matches) play();
}

if (find("data").textContent.trim())
  read().then(show, (error) =>
    say(`The data of this page cannot be read (${error.message}); it needs a browser of 2023 or newer.`));
