// Domains on and off; λ, T and k moved by hand, or left as the store has them saved.

import { count, h, oneLine } from "./dom.js";

const FACTOR = 100; // how far T can be moved, up and down
const MOST_K = 14; // powers of two

// Each: its name in a request, the position of a value on a slider from 0 to 1000 and back, and how it is said.
const SLIDERS = {
  lam: { sign: "λ", title: "weight of the keys", to: (x) => Math.round(x / 10) / 100, from: (lam) => lam * 1000, said: (lam) => lam.toFixed(2) },
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
  #reset;

  constructor(place, domains, changed) {
    this.#changed = changed;
    const chips = domains.map((one) => this.#chip(one));
    const rows = Object.keys(SLIDERS).map((name) => this.#slider(name));
    this.#reset = h("button", { type: "button", class: "link", hidden: true, onclick: () => this.#let() }, "as saved");
    place.replaceChildren(
      h("fieldset", { class: "chips" }, h("legend", {}, "Domains"), chips.length ? chips : h("span", { class: "note" }, "the store is empty")),
      h("fieldset", { class: "sliders" }, h("legend", {}, "Retrieval"), rows, this.#reset),
    );
    this.domains = domains.map((one) => one.name);
  }

  // The domains that are on, and what was moved.
  get chosen() {
    return { domains: this.domains.filter((name) => !this.#off.has(name)), knn: { ...this.#moved } };
  }

  // Takes in the settings that an answer was made with, and the mean of λ where each token has its own.
  saw(knn, meanLambda) {
    const now = { ...knn, lam: knn.lam ?? meanLambda };
    this.#saved = { ...now, ...Object.fromEntries(Object.keys(this.#moved).map((name) => [name, this.#saved?.[name] ?? now[name]])) };
    this.#show();
  }

  #chip(domain) {
    const toggled = (event) => {
      this.#off[event.target.checked ? "delete" : "add"](domain.name);
      this.#changed();
    };
    const box = h("input", { type: "checkbox", checked: true, onchange: toggled });
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
