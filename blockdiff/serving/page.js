// The page of the server: every request has a card with a player, which the events of its stream feed.

const FORMS = { regex: "Regular expression", template: "Template", json_schema: "JSON schema" };
const MOST_MOMENTS = 400; // of a canvas; of longer ones every second is left out, again and again
const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
let asked = 0; // how many requests were sent

// A request.

// The body of a request as the form says; an Error says what is wrong with it.
function bodyOf() {
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const prompt = find("prompt").value, isChat = find("path").value === "chat/completions";
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    ...{ max_tokens: number("max_tokens"), steps: number("steps"), seed: number("seed") },
    strategy: find("strategy").value.trim() || undefined,
    ...{ stream: true, stream_frames: true, stream_options: { include_usage: true } },
  };
  const kind = find("form-kind").value, text = find("form-text").value;
  if (kind) body[kind] = kind === "json_schema" ? parsed(text) : text;
  return body;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the JSON schema is not JSON: ${error.message}`);
  }
}

// The events of an answer, as they come; an Error says why there are none, or no more.
async function* eventsOf(path, body, key, signal) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(`v1/${path}`, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(errorOf(await answer.text()) ?? `the server answers ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server broke off its answer");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: ")).map((each) => each.slice(6))) {
      if (line === "[DONE]") return;
      if (errorOf(line)) throw new Error(errorOf(line));
      yield JSON.parse(line);
    }
  }
}

function errorOf(text) {
  try {
    return JSON.parse(text).error?.message;
  } catch {
    return undefined;
  }
}

// A card.

// A token as something one can see in a cell, as `visible` in blockdiff/plots/trace_moments.py has it.
function visible(text) {
  const named = text.length > 2 && text.startsWith("<") && text.endsWith(">") ? text.replace(/^[<|>]+|[<|>]+$/g, "") || text : text;
  const signs = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·" };
  const escaped = (c) => [...Array(c.length).keys()].map((at) => `\\u${c.charCodeAt(at).toString(16).padStart(4, "0")}`).join("");
  return named === "" ? "∅" : named.replace(/[\n\t\r ]/g, (c) => signs[c]).replace(/[\p{C}\u2028\u2029]/gu, escaped);
}

class Card {
  constructor(prompt, body) {
    const element = find("card").content.cloneNode(true).firstElementChild;
    this.element = element;
    this.name = `Request ${++asked}`;
    this.data = { texts: [], most: 0.5 };
    this.places = new Map(); // of texts in data.texts
    this.guessed = new Map(); // by the canvas: the tokens of its last step
    this.steps = []; // of each canvas
    this.tokens = null;
    this.began = performance.now();
    this.isDue = false; // whether it will be drawn soon
    this.ending = new AbortController();
    const form = Object.keys(FORMS).find((name) => body[name] !== undefined);
    const control = form ? `${FORMS[form]}: ${form === "json_schema" ? JSON.stringify(body[form]) : body[form]}` : "";
    this.request = { prompt, control, text: "", views: [] };
    this.player = new Player(element, this.data);
    this.part("switch").hidden = true; // the events do not have what a step saw
    this.part("h2").textContent = body.seed === undefined ? this.name : `${this.name}, seed ${body.seed}`;
    this.part("stop").addEventListener("click", () => (this.isOver ? element.remove() : this.ending.abort()));
    element.addEventListener("keydown", (event) => this.player.pressed(event));
    this.part("numbers").setAttribute("aria-live", "off");
    this.player.chooseRequest(this.request);
    element.dataset.state = "running";
    this.say("waiting");
  }

  part(name) {
    return this.element.querySelector(name === "h2" ? ".head h2" : `.${name}`);
  }

  get isOver() {
    return this.element.dataset.state !== "running";
  }

  get summary() {
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1);
    const canvases = this.request.views.length, words = [canvases === 1 ? "1 canvas" : `${canvases} canvases`, count(this.steps.reduce((sum, each) => sum + each, 0), "step")];
    if (this.tokens !== null) words.push(count(this.tokens, "token"));
    return `${words.join(" · ")} · ${seconds} s`;
  }

  say(words) {
    this.part("state").textContent = words;
  }

  async run(path, body, key) {
    try {
      for await (const event of eventsOf(path, body, key, this.ending.signal)) this.take(event);
      this.end("done", this.summary);
    } catch (error) {
      if (error.name === "AbortError") this.end("stopped", `stopped · ${this.summary}`);
      else this.fail(error instanceof TypeError ? `the server cannot be reached (${error.message})` : error.message);
    }
  }

  take(event) {
    if (event.frame) this.takeFrame(event.frame);
    for (const { delta, text, steps } of event.choices) {
      this.request.text += delta ? (delta.reasoning_content ?? "") + (delta.content ?? "") : text ?? "";
      this.steps = steps ?? this.steps;
    }
    if (event.usage) this.tokens = event.usage.completion_tokens;
    this.say(this.summary);
    if (this.isDue) return;
    this.isDue = true;
    const draw = () => {
      this.isDue = false;
      if (!this.isOver) this.player.refresh();
    };
    if (calm.matches) setTimeout(draw, 1000);
    else requestAnimationFrame(draw);
  }

  takeFrame(frame) {
    const name = `canvas ${frame.canvas + 1}`, before = this.guessed.get(frame.canvas) ?? frame.tokens;
    const flags = frame.tokens.map((token, place) => {
      const pinned = frame.is_pinned?.[place] ? FLAGS.pinned : 0, kept = frame.is_kept[place];
      if (frame.is_committed) return (kept ? STATES.indexOf("committed") : STATES.indexOf("noise")) | pinned;
      const marks = (kept ? FLAGS.kept : 0) | pinned | (frame.stays?.[place] ? FLAGS.stays : 0);
      return STATES.indexOf("guess") | (marks || FLAGS.renewed) | (token === before[place] ? 0 : FLAGS.changed);
    });
    this.steps[frame.canvas] = frame.step + (frame.is_committed ? 0 : 1); // a slow reader misses frames
    const moment = { flags, text: frame.texts.map((text) => this.placeOf(visible(text))) };
    if (frame.is_committed) {
      const kept = frame.is_kept.filter(Boolean).length;
      this.player.append({ name }, { ...moment, name: "committed", detail: count(kept, "token") });
      return;
    }
    this.guessed.set(frame.canvas, frame.tokens);
    this.data.most = Math.max(this.data.most, ...frame.entropy);
    const entropy = frame.entropy.map((each) => Math.round(1000 * each)), detail = `T ${frame.temperature.toFixed(2)}`;
    this.player.append({ name, steps: frame.step + 1, limit: null }, { ...moment, name: `step ${frame.step + 1}`, detail, entropy });
    const view = this.request.views.find((each) => each.name === name);
    if (view.moments.length > MOST_MOMENTS) view.moments = view.moments.filter((_, place) => place % 2 === 0);
  }

  placeOf(text) {
    if (!this.places.has(text)) this.places.set(text, this.data.texts.push(text) - 1);
    return this.places.get(text);
  }

  end(state, words) {
    this.element.dataset.state = state;
    this.player.refresh();
    this.part("numbers").setAttribute("aria-live", "polite");
    this.part("stop").textContent = "Remove";
    this.say(words);
    find("news").textContent = `${this.name}: ${words}`;
  }

  // An answer that was refused before it began leaves no card, and what is wrong is said beside the form.
  fail(message) {
    this.end("failed", message);
    this.part("state").classList.add("problem");
    if (this.steps.length) return;
    this.element.remove();
    find("error").textContent = message;
    find("error").scrollIntoView({ block: "nearest" });
  }
}

// The form.

function send() {
  find("error").textContent = "";
  try {
    const path = find("path").value, body = bodyOf(), key = find("key").value.trim(), prompt = find("prompt").value;
    const bodies = Array.from({ length: Number(find("answers").value) }, (_, place) =>
      (body.seed === undefined ? body : { ...body, seed: body.seed + place }));
    const cards = bodies.map((each) => new Card(prompt, each));
    find("cards").prepend(...cards.map((card) => card.element));
    cards.forEach((card, place) => card.run(path, bodies[place], key));
  } catch (error) {
    find("error").textContent = error.message;
  }
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  find("form").requestSubmit();
});
find("form-kind").addEventListener("change", () => {
  const kind = find("form-kind").value;
  find("form-part").hidden = !kind;
  find("form-part").querySelector("label").textContent = FORMS[kind] ?? "";
});
find("path").value = document.body.dataset.path;
find("settings").open = window.matchMedia("(min-width: 700px)").matches;
document.documentElement.dataset.ready = "yes";
