// The page: text, controls, and the card of a token. Texts reach the document as text only, never as markup.

const element = (id) => document.getElementById(id);
const state = readState(JSON.parse(element("data").textContent));
const tokens = [];
const chosen = { moment: state.moments.length - 1, layer: null, head: null, token: null, at: null };
let moveChart;
let timer = null;

const count = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function add(parent, tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

function build() {
  const answer = state.texts.length - state.prompt;
  element("subtitle").textContent =
    `${state.model} · ${plural(state.layers.length, state.slidingLayers ? "global layer" : "layer")} of ` +
    plural(state.heads, "KV head") +
    (state.slidingLayers ? ` · ${plural(state.slidingLayers, "sliding layer")} not shown: each holds its window` : "");
  for (const { name, value, note } of state.figures) {
    const tile = add(element("figures"), "div");
    add(tile, "dt", name);
    add(tile, "dd", value, "value");
    add(tile, "dd", note, "note");
  }
  element("prompt-title").textContent = `Prompt, ${plural(state.prompt, "token")}`;
  element("answer-title").textContent = `Answer, ${plural(answer, "token")}`;
  state.texts.forEach((text, position) => {
    const token = add(element(position < state.prompt ? "prompt" : "answer"), "span", "", "token");
    token.dataset.position = position;
    token.id = `token-${position}`;
    writeToken(token, text);
    tokens.push(token);
  });
  tokens[tokens.length - 1].classList.add("last");
  choices(element("layer"), state.layers);
  choices(element("head"), [...Array(state.heads).keys()]);
  const slider = element("moment");
  slider.max = state.moments.length - 1;
  slider.disabled = element("play").disabled = state.moments.length === 1;
  element("strip-first").textContent = state.layers[0];
  element("strip-last").textContent = state.layers.at(-1);
  moveChart = drawChart(element("chart"), state);
}

// Line breaks and the first bytes of a character can be pointed at, too.
function writeToken(token, text) {
  if (!text) add(token, "span", "·", "mark");
  text.split("\n").forEach((line, index) => {
    if (index) {
      add(token, "span", "↵", "mark");
      token.append("\n");
    }
    token.append(line);
  });
}

function choices(select, names) {
  add(select, "option", "all").value = "";
  names.forEach((name, index) => (add(select, "option", name).value = index));
}

function draw() {
  const moment = state.moments[chosen.moment];
  const lanes = lanesOf(state, chosen.layer, chosen.head);
  const { held, lost } = sharesOf(state, moment, lanes);
  tokens.forEach((token, position) => {
    const unread = position >= moment.seen;
    // The last token was chosen but never appended, so nobody holds it.
    token.classList.toggle("unread", unread && !(moment.kind === "end" && position === state.appended));
    token.style.setProperty("--share", unread ? 0 : held[position].toFixed(3));
    token.style.setProperty("--lost", unread ? 0 : lost[position].toFixed(3));
  });
  element("moment").value = chosen.moment;
  element("moment").setAttribute("aria-valuetext", title(moment));
  element("layer").value = chosen.layer ?? "";
  element("head").value = chosen.head ?? "";
  writeCaption(moment, held);
  const strip = element("strip");
  drawStrip(strip, state, moment, chosen.layer, chosen.head);
  strip.setAttribute("aria-label", `Layers by position. ${element("caption").textContent}`);
  moveChart(moment);
  element("chart-full").textContent = `full cache ${count(moment.seen)}`;
  element("chart-held").textContent = `held ${count(moment.held)}`;
  element("chart").setAttribute("aria-label", `A full cache holds ${count(moment.seen)} slots, this one ${count(moment.held)}`);
  drawCard();
}

function title(moment) {
  if (moment.kind === "before") return "Before the first eviction";
  if (moment.kind === "end") return "At the end";
  return `After eviction ${count(moment.cuts)} of ${count(state.cuts.step.length)}`;
}

function writeCaption(moment, held) {
  const caption = element("caption");
  caption.textContent = "";
  add(caption, "b", title(moment));
  const doing = moment.kind === "after" ? (moment.phase === "prefill" ? ", reading the prompt" : ", decoding") : "";
  caption.append(`${doing}: ${plural(moment.seen, "token")} seen, ${count(moment.held)} slots held`);
  let everywhere = 0, nowhere = 0;
  for (let position = 0; position < moment.seen; position++) {
    everywhere += held[position] > 0.9999;
    nowhere += held[position] === 0;
  }
  const counts = element("counts");
  counts.textContent = "";
  for (const [name, value] of [
    ["held everywhere", count(everywhere)],
    ["in part", count(moment.seen - everywhere - nowhere)],
    ["nowhere", count(nowhere)],
    ["mass dropped, all layers", percent(moment.massDropped)],
  ]) {
    const pair = add(counts, "div");
    add(pair, "dt", name);
    add(pair, "dd", value);
  }
}

function drawCard() {
  const card = element("card");
  tokens.forEach((token, position) => token.classList.toggle("picked", position === chosen.token));
  for (const text of document.querySelectorAll(".text")) text.removeAttribute("aria-activedescendant");
  card.hidden = chosen.token === null;
  if (card.hidden) return;
  const position = chosen.token;
  const moment = state.moments[chosen.moment];
  const token = tokens[position];
  token.parentElement.setAttribute("aria-activedescendant", token.id);
  element("card-token").textContent = JSON.stringify(state.texts[position]);
  const facts = element("card-facts");
  facts.textContent = "";
  const fact = (name, value) => {
    add(facts, "dt", name);
    add(facts, "dd", value);
  };
  fact("position", count(position));
  const grid = element("card-grid");
  const stored = position < state.appended;
  grid.hidden = element("card-legend").hidden = !stored || position >= moment.seen;
  if (!stored) {
    fact("held", "chosen last, never stored");
  } else {
    const lanes = lanesOf(state, chosen.layer, chosen.head);
    const held = lanes.filter((lane) => holds(state, moment, lane, position)).length;
    const seen = position < moment.seen;
    fact("held by", seen ? `${count(held)} of ${count(lanes.length)} (${percent(held / lanes.length)})` : "not read yet");
    fact("mass received, mean", `${meanMass(state, lanes, position).toPrecision(2)} queries`);
    if (seen) {
      drawGrid(grid, state, moment, position, lanes);
      grid.setAttribute("aria-label", `Held by ${held} of ${lanes.length}`);
      element("card-legend").textContent = `layers ${state.layers[0]} to ${state.layers.at(-1)} across, KV heads down`;
    }
  }
  placeCard(card, token);
}

// Below the token, or below the pointer if that is over the picture; above where there is no room.
function placeCard(card, token) {
  const box = chosen.at ?? token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - card.offsetWidth - 12);
  const below = box.bottom + 8 + card.offsetHeight < window.innerHeight;
  const top = below ? box.bottom + 8 : box.top - card.offsetHeight - 8;
  card.style.left = `${Math.max(8, left) + window.scrollX}px`;
  card.style.top = `${top + window.scrollY}px`;
}

function pick(token, at = null) {
  if (token === chosen.token && at === chosen.at) return;
  Object.assign(chosen, { token, at });
  drawCard();
}

function choose(changes) {
  Object.assign(chosen, changes);
  draw();
}

function play(on) {
  clearInterval(timer);
  timer = null;
  element("play").setAttribute("aria-pressed", on);
  if (!on) return;
  const last = state.moments.length - 1;
  if (chosen.moment === last) choose({ moment: 0 });
  timer = setInterval(() => {
    choose({ moment: chosen.moment + 1 });
    if (chosen.moment === last) play(false);
  }, Math.max(60, Math.min(500, 12000 / last)));
}

function listen() {
  element("moment").addEventListener("input", (event) => {
    play(false);
    choose({ moment: Number(event.target.value) });
  });
  element("play").addEventListener("click", () => play(timer === null));
  for (const name of ["layer", "head"]) {
    element(name).addEventListener("change", ({ target }) => {
      choose({ [name]: target.value === "" ? null : Number(target.value) });
    });
  }
  const strip = element("strip");
  strip.addEventListener("click", (event) => {
    const { layer } = placeInStrip(strip, state, event);
    choose({ layer: layer === chosen.layer ? null : layer });
  });
  strip.addEventListener("pointermove", (event) => {
    const { clientX: left, clientY: top } = event;
    pick(placeInStrip(strip, state, event).position, { left: left + 8, top, bottom: top + 8 });
  });
  strip.addEventListener("pointerleave", () => pick(null));
  for (const text of document.querySelectorAll(".text")) {
    text.addEventListener("pointerover", ({ target }) => {
      const token = target.closest(".token");
      if (token) pick(Number(token.dataset.position));
    });
    text.addEventListener("pointerleave", () => pick(null));
    text.addEventListener("blur", () => pick(null));
    text.addEventListener("keydown", walk);
  }
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function walk(event) {
  const text = event.currentTarget;
  const first = Number(text.firstElementChild.dataset.position);
  const last = Number(text.lastElementChild.dataset.position);
  const inside = chosen.token !== null && chosen.token >= first && chosen.token <= last;
  const to = {
    ArrowRight: inside ? Math.min(last, chosen.token + 1) : first,
    ArrowLeft: inside ? Math.max(first, chosen.token - 1) : last,
    Home: first,
    End: last,
    Escape: null,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (to !== null) tokens[to].scrollIntoView({ block: "nearest" });
  pick(to);
}

// A view can be linked to: page.html#moment=7&layer=3&head=0&token=120, all counted from 0 among those shown.
function readLink() {
  const limits = { moment: state.moments.length, layer: state.layers.length, head: state.heads, token: state.texts.length };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const number = Number(value);
    if (name in limits && Number.isInteger(number) && number >= 0 && number < limits[name]) chosen[name] = number;
  }
}

build();
readLink();
listen();
draw();
if (chosen.token !== null) {
  tokens[chosen.token].scrollIntoView({ block: "nearest" });
  drawCard();
}
