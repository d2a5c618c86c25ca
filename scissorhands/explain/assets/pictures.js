// The three pictures beside the text: layers by position, slots over time, and the lanes of one token.

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map(Number);
}

// Sizes a canvas to the pixels of the screen and returns its context.
function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// One row a layer, one column a position or a few: shaded by the share of the chosen heads that hold it.
function drawStrip(canvas, state, moment, layer, head) {
  const { width, height } = canvas.getBoundingClientRect();
  const context = sharp(canvas, width, height);
  const columns = Math.min(state.appended, canvas.width);
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = state.layers.length;
  const image = new ImageData(columns, state.layers.length);
  const [held, cut, track, paper] = ["--held", "--cut", "--track", "--paper"].map(color);
  for (let row = 0; row < state.layers.length; row++) {
    const shares = sharesOf(state, moment, lanesOf(state, row, head));
    for (let column = 0; column < columns; column++) {
      const from = Math.floor((column * state.appended) / columns);
      const to = Math.floor(((column + 1) * state.appended) / columns);
      let kept = 0, lost = 0;
      for (let position = from; position < to; position++) {
        kept += shares.held[position] / (to - from);
        lost += shares.lost[position] / (to - from);
      }
      const ground = from < moment.seen ? track : paper;
      const at = 4 * (row * columns + column);
      for (let part = 0; part < 3; part++) {
        image.data[at + part] = ground[part] + kept * (held[part] - ground[part]) + lost * (cut[part] - ground[part]);
      }
      image.data[at + 3] = 255;
    }
  }
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, height);
  const ink = color("--ink").join(" ");
  if (layer !== null) {
    context.strokeStyle = `rgb(${ink})`;
    context.lineWidth = 1.5;
    const row = height / state.layers.length;
    context.strokeRect(0.75, layer * row, width - 1.5, row);
  }
  const [reading, answer] = [moment.seen, state.prompt].map((position) => (position / state.appended) * width);
  context.fillStyle = `rgb(${ink} / .75)`;
  if (moment.seen < state.appended) context.fillRect(reading, 0, 1.5, height);
  context.fillStyle = `rgb(${ink} / .4)`;
  for (let y = 0; y < height && answer < width; y += 6) context.fillRect(answer, y, 1, 3);
}

// Where a pointer is in the strip, as a layer and a position.
function placeInStrip(canvas, state, event) {
  const box = canvas.getBoundingClientRect();
  const part = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value * count)));
  return {
    layer: part((event.clientY - box.top) / box.height, state.layers.length),
    position: part((event.clientX - box.left) / box.width, state.appended),
  };
}

// Slots over tokens seen: what a full cache would hold, and what is held.
function drawChart(svg, state) {
  const x = (tokens) => ((100 * tokens) / state.appended).toFixed(3);
  const y = (slots) => (100 - (94 * slots) / state.appended).toFixed(3);
  const path = ["M0 100"];
  let held = 0, seen = 0;
  for (const moment of state.moments) {
    path.push(`L${x(moment.seen)} ${y(held + moment.seen - seen)}`, `L${x(moment.seen)} ${y(moment.held)}`);
    ({ held, seen } = moment);
  }
  const shape = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
    return element;
  };
  shape("path", { class: "saved", d: `M0 100 L100 ${y(state.appended)} L100 100 Z` });
  shape("path", { class: "kept", d: `${path.join(" ")} L100 100 Z` });
  const line = shape("line", { class: "now", y1: 0, y2: 100 });
  return (moment) => ["x1", "x2"].forEach((end) => line.setAttribute(end, x(moment.seen)));
}

// One column a layer, one row a head: filled where the token is held.
function drawGrid(canvas, state, moment, position, lanes) {
  const cell = Math.max(4, Math.min(12, Math.floor(272 / state.layers.length)));
  const [width, height] = [state.layers.length * cell, state.heads * cell];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = sharp(canvas, width, height);
  const chosen = new Set(lanes);
  for (let lane = 0; lane < state.lanes; lane++) {
    const held = holds(state, moment, lane, position);
    const name = held ? "--held" : justDropped(state, moment, lane, position) ? "--cut" : "--track";
    context.fillStyle = `rgb(${color(name).join(" ")} / ${chosen.has(lane) ? 1 : 0.3})`;
    context.fillRect(Math.floor(lane / state.heads) * cell, (lane % state.heads) * cell, cell - 1, cell - 1);
  }
}
