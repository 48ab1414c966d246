"use strict";
// Shows the canvases of a request, step by step and position by position. The page of a trace has one player for all of
// its requests; the server's page has one for each request and feeds it while the request runs (append, refresh).
// Texts become text nodes, never markup.

const STATES = ["noise", "guess", "committed", "given"]; // the lowest two bits of a cell's flags
const FLAGS = { kept: 4, changed: 8, wrong: 16, pinned: 32, stays: 64, renewed: 128, accepted: 256, rejected: 512, own: 1024 };
const MILLISECONDS = 700; // from one step to the next while playing

const find = (id) => document.getElementById(id);
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// One cell of a moment.

const has = (moment, place, flag) => (moment.flags[place] & FLAGS[flag]) !== 0;
const stateOf = (moment, place) => STATES[moment.flags[place] & 3];
const entropyOf = (moment, place) => (moment.entropy && moment.entropy[place] >= 0 ? moment.entropy[place] / 1000 : null);

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

class Player {
  // root: an element with the markup of player.html; data: the texts that moments have numbers of, and `most`, the
  // entropy that has the strongest colour
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.request = null;
    this.view = undefined; // a canvas of the request, or all of them as a square
    this.at = 0; // which moment of it
    this.position = 0; // which cell the arrow keys are at
    this.timer = null;
    this.isSeen = false; // whether the canvas shows the tokens that the step saw
    this.follows = true; // whether a new moment is shown at once
    const step = (change) => () => { this.pause(); this.go(this.at + change); };
    for (const [name, change] of [["first", -Infinity], ["back", -1], ["next", 1], ["last", Infinity]])
      this.part(name).addEventListener("click", step(change));
    this.part("play").addEventListener("click", () => (this.timer === null ? this.play() : this.pause()));
    this.part("slider").addEventListener("input", (event) => { this.pause(); this.go(Number(event.target.value)); });
    for (const [name, isSeen] of [["guess", false], ["seen", true]])
      this.part(name).addEventListener("click", () => {
        this.isSeen = isSeen;
        this.part("guess").setAttribute("aria-pressed", !isSeen);
        this.part("seen").setAttribute("aria-pressed", isSeen);
        this.draw();
      });
    this.part("stage").addEventListener("click", (event) => {
      const cell = event.target.closest("button");
      if (cell) this.moveTo(Number(cell.dataset.place));
    });
    this.part("map").addEventListener("click", (event) => {
      this.pause();
      this.go(Math.floor((event.offsetY / this.part("map").clientHeight) * this.view.moments.length));
    });
    this.part("all").addEventListener("toggle", () => this.drawAll());
    window.addEventListener("resize", () => this.drawMap());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawMap());
  }

  part(name) {
    return this.root.querySelector(`.${name}`);
  }

  // One cell.

  textAt(list, place) {
    return list && list[place] >= 0 ? this.data.texts[list[place]] : null;
  }

  noteOf(moment, place) {
    const text = this.textAt(moment.text, place), entropy = entropyOf(moment, place), state = stateOf(moment, place);
    const verdict = ["accepted", "rejected", "own"].find((flag) => has(moment, place, flag));
    const kind = verdict ? "the draft is " : state === "guess" ? "the guess is " : `${state} `;
    const words = [`position ${place + 1}: ${verdict === "own" ? "the head wrote " : kind}“${text ?? "·"}”`];
    if (entropy !== null) words.push(`entropy ${entropy.toFixed(3)} nats`);
    const seen = this.textAt(moment.seen, place), sample = this.textAt(moment.sample, place);
    if (verdict === "own") words.push(`in place of the drafted “${seen}”`);
    else if (verdict) words.push(verdict);
    else if (seen !== null) words.push(`the step saw “${seen}” here`);
    if (has(moment, place, "kept")) words.push(sample === null ? "kept" : `kept as “${sample}”, the token that was drawn`);
    if (has(moment, place, "pinned")) words.push("pinned");
    if (has(moment, place, "stays")) words.push("stands as it was");
    if (has(moment, place, "renewed")) words.push("renewed");
    if (has(moment, place, "changed")) words.push("changed since the step before");
    if (has(moment, place, "wrong")) words.push("contradicts a given");
    return words.join(", ");
  }

  dress(cell, moment, place) {
    const entropy = entropyOf(moment, place), note = this.noteOf(moment, place), state = stateOf(moment, place);
    const marks = Object.keys(FLAGS).filter((flag) => has(moment, place, flag));
    const shown = this.isSeen && state === "guess" ? moment.seen : moment.text;
    cell.textContent = this.textAt(shown, place) ?? "·";
    cell.className = ["c", `state-${state}`, ...marks, ...(cell.dataset.edges ?? "").split(" ")].join(" ").trim();
    cell.style.setProperty("--heat", entropy === null ? 0 : Math.min(1, entropy / this.data.most).toFixed(3));
    cell.setAttribute("aria-label", note);
    cell.title = note;
  }

  // What is shown of a view: its canvas, numbers, map, and all of its steps.

  get cells() {
    return [...this.part("stage").querySelectorAll(".c, button")];
  }

  layOut() {
    const stage = this.part("stage"), last = this.view.moments.at(-1), side = this.view.side;
    stage.className = "stage";
    stage.style.gridTemplateColumns = "";
    if (side) square(stage, side);
    const old = this.cells; // those that stay keep the focus
    stage.replaceChildren(...last.flags.flatMap((_, place) => {
      const cell = old[place] ?? make("button", { type: "button", tabIndex: -1 }), text = this.textAt(last.text, place) ?? "";
      cell.dataset.place = place;
      cell.dataset.edges = side ? edgesOf(place, side) : "";
      // A cell is as wide as the text that ends up there, so that nothing moves from step to step.
      cell.style.width = side ? "" : `calc(${Math.max(3, Math.min(24, [...text].length))}ch + 16px)`;
      return !side && text.includes("⏎") ? [cell, make("span", { className: "break" })] : [cell];
    }));
  }

  draw() {
    if (!this.view) return;
    const moment = this.view.moments[this.at], length = moment.flags.length, slider = this.part("slider");
    this.cells.forEach((cell, place) => {
      this.dress(cell, moment, place);
      cell.tabIndex = place === this.position ? 0 : -1;
    });
    slider.max = this.view.moments.length - 1;
    slider.value = this.at;
    this.part("where").textContent = moment.name;
    slider.setAttribute("aria-valuetext", `${moment.name}, ${this.at + 1} of ${this.view.moments.length}`);
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
    this.part("numbers").textContent = words.join(" · ");
    this.part("note").textContent = this.noteOf(moment, this.position);
    this.drawMap();
  }

  drawMap() {
    if (!this.view) return;
    const map = this.part("map"), moments = this.view.moments, length = moments[0].flags.length;
    const width = map.clientWidth || 400, scale = window.devicePixelRatio || 1, left = 78, right = 60;
    const high = Math.max(5, Math.min(22, Math.floor(420 / moments.length))), wide = (width - left - right) / length;
    map.width = width * scale;
    map.height = high * moments.length * scale;
    map.style.height = `${high * moments.length}px`;
    map.setAttribute("aria-label", this.summary());
    const pen = map.getContext("2d"), colours = getComputedStyle(document.documentElement);
    const names = ["hot", "sure", "cell", "given", "ink", "soft", "mark"];
    const colour = Object.fromEntries(names.map((name) => [name, colours.getPropertyValue(`--${name}`).trim()]));
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    moments.forEach((moment, row) => {
      const top = row * high, gap = high > 8 ? 1 : 0;
      let kept = 0;
      moment.flags.forEach((flags, place) => {
        const entropy = entropyOf(moment, place), x = left + place * wide;
        pen.fillStyle = flags & FLAGS.pinned || stateOf(moment, place) === "given" ? colour.given : colour.cell;
        pen.fillRect(x, top, wide - Math.min(1, wide / 4), high - gap);
        if (entropy !== null) {
          pen.fillStyle = `rgba(${colour.hot}, ${Math.min(1, entropy / this.data.most)})`;
          pen.fillRect(x, top, wide - Math.min(1, wide / 4), high - gap);
        }
        if (has(moment, place, "rejected")) {
          pen.fillStyle = `rgba(${colour.hot}, 0.5)`;
          pen.fillRect(x, top, wide - Math.min(1, wide / 4), high - gap);
        }
        if (flags & (FLAGS.kept | FLAGS.accepted | FLAGS.own) || stateOf(moment, place) === "committed") {
          pen.fillStyle = colour.sure;
          pen.fillRect(x, top + high - gap - Math.max(2, high / 6), wide - Math.min(1, wide / 4), Math.max(2, high / 6));
          kept += 1;
        }
      });
      pen.fillStyle = row === this.at ? colour.ink : colour.soft;
      if (high > 9 || row === this.at || row % 5 === 0) pen.fillText(moment.name, 6, top + high / 2);
      if (moment.entropy) {
        pen.fillStyle = colour.sure;
        pen.fillRect(width - right + 6, top + high / 4, (right - 12) * (kept / length), high / 2);
      }
      if (row === this.at) {
        pen.strokeStyle = colour.mark;
        pen.lineWidth = 2;
        pen.strokeRect(1, top + 1, width - 2, high - 2);
      }
    });
  }

  summary() {
    const rows = this.view.moments.filter((moment) => moment.entropy).map((moment) => {
      const known = moment.entropy.filter((entropy) => entropy >= 0);
      const mean = known.reduce((a, b) => a + b, 0) / Math.max(1, known.length) / 1000;
      return `${moment.name} ${mean.toFixed(2)}`;
    });
    return `mean entropy in nats by step: ${rows.join(", ")}`;
  }

  drawAll() {
    const strip = this.part("strip"), { moments, side } = this.view ?? { moments: [] };
    strip.replaceChildren();
    if (!this.part("all").open) return;
    const cellOf = (moment, place) => {
      const cell = make("span", {});
      if (side) cell.dataset.edges = edgesOf(place, side);
      this.dress(cell, moment, place);
      return cell;
    };
    if (side) {
      strip.append(make("div", { className: "figures" }, ...moments.map((moment) => {
        const grid = make("div", { className: "small" }, ...moment.flags.map((_, place) => cellOf(moment, place)));
        square(grid, side);
        return make("figure", {}, grid, make("figcaption", { textContent: moment.name }));
      })));
      return;
    }
    const rows = moments.map((moment) =>
      make("tr", {}, make("th", { scope: "row", textContent: moment.name }),
        ...moment.flags.map((_, place) => make("td", {}, cellOf(moment, place)))));
    strip.append(make("table", {}, make("tbody", {}, ...rows)));
  }

  drawViews() {
    const { views } = this.request, canvases = views.filter((each) => each.steps !== undefined);
    const most = Math.max(1, ...canvases.map((each) => each.limit ?? each.steps));
    this.part("views").replaceChildren(...views.map((each) => {
      const button = make("button", { type: "button" }, each.name);
      if (each.steps !== undefined) {
        const isAtLimit = each.limit !== null && each.steps >= each.limit;
        const words = count(each.steps, "step") + (isAtLimit ? ", the limit: it did not converge" : "");
        const bar = make("span", { className: isAtLimit ? "full" : "" });
        bar.style.width = `${(100 * each.steps) / most}%`;
        button.append(" ", make("small", { textContent: words }), make("span", { className: "bar" }, bar));
      }
      button.setAttribute("aria-pressed", each === this.view);
      button.addEventListener("click", () => { this.pause(); this.choose(each); });
      return button;
    }));
  }

  drawTexts() {
    for (const part of ["prompt", "text", "control"]) this.part(part).textContent = this.request[part];
    this.part("control-part").hidden = !this.request.control;
  }

  drawPictures() {
    const pictures = this.request.pictures ?? []; // as data URIs
    this.part("pictures").hidden = !pictures.length;
    this.part("pictures").replaceChildren(
      ...pictures.map((src, place) => make("img", { src, alt: `picture ${place + 1} of the prompt` })));
  }

  // Going from one to another.

  go(moment) {
    if (!this.view) return; // a request that has not begun
    const last = this.view.moments.length - 1;
    this.at = Math.max(0, Math.min(last, moment));
    this.follows = this.at === last && this.view === this.request.views.at(-1);
    this.draw();
  }

  choose(view) {
    this.view = view;
    this.position = 0;
    this.drawViews();
    this.layOut();
    this.go(0);
    this.drawAll();
  }

  chooseRequest(request) {
    this.pause();
    this.request = request;
    this.view = undefined;
    this.drawTexts();
    this.drawPictures();
    this.drawViews();
    if (request.views.length) this.choose(request.views[0]);
  }

  play() {
    if (!this.view) return;
    if (this.at === this.view.moments.length - 1) this.go(0);
    const next = () => (this.at === this.view.moments.length - 1 ? this.pause() : this.go(this.at + 1));
    this.timer = setInterval(next, MILLISECONDS);
    this.part("play").textContent = "❚❚ pause";
    this.part("numbers").setAttribute("aria-live", "off"); // a screen reader would not keep up
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.part("play").textContent = "▶ play";
    this.part("numbers").setAttribute("aria-live", "polite");
  }

  moveTo(place) {
    this.position = Math.max(0, Math.min(this.view.moments[this.at].flags.length - 1, place));
    this.draw();
    this.cells[this.position].focus();
  }

  get columns() {
    if (this.view.side) return this.view.side;
    const all = this.cells, top = all[0].offsetTop, next = all.findIndex((cell) => cell.offsetTop > top);
    return next < 0 ? all.length : next;
  }

  pressed(event) {
    if (!this.view || event.ctrlKey || event.altKey || event.metaKey) return;
    const target = event.target, slider = this.part("slider"), views = this.request.views;
    const inStage = this.part("stage").contains(target);
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key], down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const canvas = { PageUp: -1, PageDown: 1 }[event.key], isEnd = event.key === "Home" || event.key === "End";
    if (inStage && (across || down)) this.moveTo(this.position + (across ?? down * this.columns));
    else if (inStage && event.key === "Escape") slider.focus();
    else if (target === slider && (across || down || isEnd)) return this.pause(); // it moves itself
    else if (across) { this.pause(); this.go(this.at + across); }
    else if (isEnd) { this.pause(); this.go(event.key === "Home" ? 0 : Infinity); }
    else if (canvas) { this.pause(); this.choose(views[(views.indexOf(this.view) + canvas + views.length) % views.length]); }
    else if (event.key === " " && !target.closest("button, summary")) this.timer === null ? this.play() : this.pause();
    else return undefined;
    event.preventDefault();
  }

  // A request that runs.

  // One more moment: `facts` are those of its view; a view with another name is a new one. `refresh` then shows it.
  append(facts, moment) {
    const views = this.request.views;
    let view = views.find((each) => each.name === facts.name);
    if (!view) views.push((view = { moments: [] }));
    Object.assign(view, facts).moments.push(moment);
  }

  // Show what is new: who looks at the last moment goes on with it.
  refresh() {
    const last = this.request.views.at(-1), follows = this.follows && this.timer === null;
    this.drawTexts();
    if (!last) return;
    if (follows || !this.view) this.view = last;
    this.drawViews();
    this.layOut();
    this.go(follows ? Infinity : this.at);
    this.drawAll();
  }
}
