// Domains on and off; λ, T and k moved by hand, or left as the store has them saved.

import { count, h, oneLine } from "./dom.js";

const FACTOR = 100; // how far T can be moved, up and down
const MOST_K = 14; // powers of two

// Each: its name in a request, the position of a value on a slider from 0 to 1000 and back, and how it is said.
const SLIDERS = {
  lam: { sign: "λ", title: "weight of what was retrieved; where it is moved, of keys alone", to: (x) => Math.round(x / 10) / 100, from: (lam) => lam * 1000, said: (lam) => lam.toFixed(2) },
  temperature: {
    sign: "T", title: "temperature of the distances",
    to: (x, saved) => Number((saved * FACTOR ** (x / 500 - 1)).toPrecision(3)),
    from: (T, saved) => 500 * (1 + Math.log(T / saved) / Math.log(FACTOR)),
    said: (T) => String(Number(T.toPrecision(3))),
  },
  k: { sign: "k", title: "neighbors", to: (x) => Math.round(2 ** ((x / 1000) * MOST_K)), from: (k) => (1000 * Math.log2(k)) / MOST_K, said: count },
  probes: { sign: "cells", title: "cells that are visited", to: (x) => Math.round(2 ** ((x / 1000) * 7)), from: (n) => (1000 * Math.log2(n)) / 7, said: count },
};

export class Controls {
  #changed;
  #saved = null;
  #moved = {};
  #off = new Set();
  #sliders = {};
  #chips = h("fieldset", { class: "chips" });
  #retrieval;
  #reset;

  constructor(place, changed) {
    this.#changed = changed;
    const rows = Object.keys(SLIDERS).map((name) => this.#slider(name));
    this.#reset = h("button", { type: "button", class: "link", hidden: true, onclick: () => this.#let() }, "as saved");
    this.#retrieval = h("fieldset", { class: "sliders" }, h("legend", {}, "Retrieval"), rows, this.#reset);
    place.replaceChildren(this.#chips, this.#retrieval);
  }

  // The domains that are there; those that were off stay off.
  offer(domains) {
    const chips = domains.map((one) => this.#chip(one));
    this.domains = domains.map((one) => one.name);
    this.#chips.replaceChildren(
      h("legend", {}, "Domains"), ...(chips.length ? chips : [h("span", { class: "note" }, "the store is empty")]));
  }

  // The domains that are on, and what was moved.
  get chosen() {
    return { domains: this.domains.filter((name) => !this.#off.has(name)), knn: { ...this.#moved } };
  }

  // Takes in the settings that an answer was made with, and the mean of λ where each token has its own.
  saw(knn, meanLambda) {
    this.#retrieval.hidden = knn.lam === 0 && this.#moved.lam !== 0; // no keys are searched
    if (this.#retrieval.hidden) return;
    const now = { ...knn, lam: knn.lam ?? meanLambda };
    this.#saved = { ...now, ...Object.fromEntries(Object.keys(this.#moved).map((name) => [name, this.#saved?.[name] ?? now[name]])) };
    this.#show();
  }

  #chip(domain) {
    const toggled = (event) => {
      this.#off[event.target.checked ? "delete" : "add"](domain.name);
      this.#changed();
    };
    const box = h("input", { type: "checkbox", checked: !this.#off.has(domain.name), onchange: toggled });
    return h("label", { class: "chip" }, box, h("bdi", {}, oneLine(domain.name)), h("span", { class: "note" }, count(domain.tokens)));
  }

  #slider(name) {
    const { sign, title, to } = SLIDERS[name];
    const said = h("output", { for: `slide-${name}` });
    const moved = () => {
      this.#moved[name] = to(Number(input.value), this.#saved?.temperature);
      this.#show();
      this.#changed();
    };
    const input = h("input", { type: "range", id: `slide-${name}`, min: 0, max: 1000, step: 1, disabled: true, oninput: moved });
    const row = h("div", { class: "slider", title }, h("label", { for: input.id }, h("abbr", { title }, sign)), input, said);
    this.#sliders[name] = { input, said, row };
    return row;
  }

  #let() {
    this.#moved = {};
    this.#show();
    this.#changed();
  }

  #show() {
    const now = { ...this.#saved, ...this.#moved };
    for (const [name, { input, said, row }] of Object.entries(this.#sliders)) {
      row.hidden = (name === "k" && now.probes !== null) || (name === "probes" && now.probes === null);
      if (this.#saved === null || now[name] === null || now[name] === undefined) continue;
      input.disabled = false;
      if (document.activeElement !== input) input.value = SLIDERS[name].from(now[name], this.#saved.temperature);
      const of = name === "lam" && !("lam" in this.#moved) && now.mixer !== "fixed" ? ` (${now.mixer}, mean)` : "";
      said.textContent = SLIDERS[name].said(now[name]) + of;
      input.setAttribute("aria-valuetext", said.textContent);
    }
    this.#reset.hidden = Object.keys(this.#moved).length === 0;
  }
}
