"use strict";
// What the page knows: who held which token, at every moment. Nothing here draws.
//
// `layers` are the numbers of the global layers, those that evict; elsewhere a layer is an index into them. A lane is one
// KV head of one layer. `droppedAt[lane * appended + position]` is the number of the eviction, from 1,
// that dropped a token's slot; 0 if it is held to the end. `mass` has the same order. A moment is where the slider can
// stand: before the first eviction, after each, and at the end.

function readState(raw) {
  const state = {
    ...raw,
    lanes: raw.layers.length * raw.heads,
    droppedAt: wholeNumbers(raw.droppedAt),
    mass: upperHalves(raw.mass),
  };
  state.moments = momentsOf(state);
  return state;
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function wholeNumbers({ bytes, data }) {
  const Kind = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[bytes];
  return new Kind(bytesOf(data).buffer);
}

function upperHalves(base64) {
  const halves = new Uint16Array(bytesOf(base64).buffer);
  return new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
}

// Slots are counted whole, and told as the mean over the lanes.
function momentsOf({ appended, lanes, droppedAt, cuts }) {
  const dropped = new Uint32Array(cuts.step.length + 1);
  for (const cut of droppedAt) dropped[cut] += 1;
  const moments = [];
  let held = 0, seen = 0, mass = 0;
  const readTo = (step) => {
    held += lanes * (step - seen);
    seen = step;
  };
  const add = (kind, number) => {
    const phase = cuts.phase[number - 1];
    moments.push({ kind, cuts: number, phase, seen, held: held / lanes, massDropped: mass / (lanes * seen) });
  };
  cuts.step.forEach((step, index) => {
    readTo(step);
    if (index === 0) add("before", 0);
    held -= dropped[index + 1];
    mass += cuts.mass[index];
    add("after", index + 1);
  });
  readTo(appended);
  add("end", cuts.step.length);
  return moments;
}

// The lanes of a layer and a head; null means all of them.
function lanesOf({ layers, heads }, layer, head) {
  const found = [];
  for (let l = 0; l < layers.length; l++) {
    for (let h = 0; h < heads; h++) {
      if ((layer === null || layer === l) && (head === null || head === h)) found.push(l * heads + h);
    }
  }
  return found;
}

function holds(state, moment, lane, position) {
  const cut = state.droppedAt[lane * state.appended + position];
  return position < moment.seen && (cut === 0 || cut > moment.cuts);
}

function justDropped(state, moment, lane, position) {
  return moment.kind === "after" && state.droppedAt[lane * state.appended + position] === moment.cuts;
}

// For every position, the share of the lanes that hold it, and the share that has just dropped it.
function sharesOf(state, moment, lanes) {
  const held = new Float32Array(state.appended);
  const lost = new Float32Array(state.appended);
  for (const lane of lanes) {
    for (let position = 0; position < moment.seen; position++) {
      if (holds(state, moment, lane, position)) held[position] += 1;
      else if (justDropped(state, moment, lane, position)) lost[position] += 1;
    }
  }
  for (let position = 0; position < state.appended; position++) {
    held[position] /= lanes.length;
    lost[position] /= lanes.length;
  }
  return { held, lost };
}

function meanMass(state, lanes, position) {
  let sum = 0;
  for (const lane of lanes) sum += state.mass[lane * state.appended + position];
  return sum / lanes.length;
}
