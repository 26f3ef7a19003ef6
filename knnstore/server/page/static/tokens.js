// The text, token by token.

import { h, label, percent, probability, shownToken } from "./dom.js";
import { shareOf } from "./parts.js";

export class TokenView {
  #list;
  #peek;
  #tokens = [];
  #at = -1;
  #marked = null;
  #choose;

  constructor(list, peek, choose) {
    [this.#list, this.#peek, this.#choose] = [list, peek, choose];
    list.addEventListener("click", (event) => this.#clicked(event));
    list.addEventListener("keydown", (event) => this.#pressed(event));
    list.addEventListener("pointerover", (event) => this.#hovered(event));
    list.addEventListener("pointerleave", () => (peek.hidden = true));
  }

  // New tokens, or the same ones with other probabilities: returns which. Those from `written` on were written by the model.
  show(tokens, written) {
    const same = tokens.length === this.#tokens.length && tokens.every((one, at) => one.token === this.#tokens[at].token);
    this.mark(null);
    this.#tokens = tokens;
    if (!same) {
      this.#at = -1;
      this.#list.removeAttribute("aria-activedescendant");
      this.#list.replaceChildren(
        ...tokens.map((token, at) => h("span", { id: `t${at}`, role: "option", "aria-selected": "false" }, shownToken(token.text))),
      );
    }
    tokens.forEach((token, at) => {
      const element = this.#list.children[at];
      element.classList.toggle("written", at >= written);
      element.setAttribute("aria-label", `${label(token.text)}, ${this.#said(token)}`);
    });
    return same;
  }

  color(name) {
    this.#list.dataset.by = name;
    this.#tokens.forEach((token, at) => this.#list.children[at].style.setProperty("--s", shareOf(token, name).toFixed(3)));
  }

  // Marks the tokens that a document changed; null marks none.
  mark(document) {
    if (document === this.#marked) return;
    this.#marked = document;
    for (const element of this.#list.querySelectorAll(".helped, .harmed")) element.classList.remove("helped", "harmed");
    this.#list.classList.toggle("marked", document !== null);
    const first = this.#tokens[0]?.position;
    document?.positions.forEach((position, at) => {
      const helped = document.p_without[at] < this.#tokens[position - first].p;
      this.#list.children[position - first].classList.add(helped ? "helped" : "harmed");
    });
  }

  choose(at) {
    if (at === this.#at) return; // and nothing scrolls to where it is
    this.#list.children[this.#at]?.setAttribute("aria-selected", "false");
    this.#at = at;
    const element = this.#list.children[at];
    if (!element) return this.#list.removeAttribute("aria-activedescendant");
    element.setAttribute("aria-selected", "true");
    this.#list.setAttribute("aria-activedescendant", element.id);
    element.scrollIntoView({ block: "nearest" });
  }

  focus() {
    this.#list.focus({ preventScroll: true });
  }

  #said(token) {
    return `p ${probability(token.p)}, model alone ${probability(token.p_lm)}, ${percent(shareOf(token, "store"))} from the store`;
  }

  #indexOf(target) {
    return Number(target.closest("[role=option]")?.id.slice(1) ?? -1);
  }

  #clicked(event) {
    const at = this.#indexOf(event.target);
    if (at >= 0) this.#choose(at);
  }

  #pressed(event) {
    const last = this.#tokens.length - 1;
    const backward = getComputedStyle(this.#list).direction === "rtl" ? "ArrowRight" : "ArrowLeft";
    const moves = {
      ArrowLeft: () => this.#at + (backward === "ArrowLeft" ? -1 : 1),
      ArrowRight: () => this.#at + (backward === "ArrowLeft" ? 1 : -1),
      ArrowUp: () => this.#line(-1),
      ArrowDown: () => this.#line(1),
      Home: () => 0,
      End: () => last,
      Escape: () => -1,
    };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const to = move();
    this.#choose(event.key === "Escape" ? -1 : Math.max(0, Math.min(last, to)));
  }

  // The token above or below.
  #line(step) {
    const here = this.#list.children[this.#at]?.getBoundingClientRect();
    if (!here) return 0;
    let [best, distance, line] = [this.#at, Infinity, null];
    for (let at = this.#at + step; this.#list.children[at]; at += step) {
      const there = this.#list.children[at].getClientRects()[0];
      if (!there || Math.abs(there.top - here.top) < here.height / 2) continue;
      line ??= there.top;
      if (Math.abs(there.top - line) > here.height / 2) break;
      if (Math.abs(there.left - here.left) < distance) [best, distance] = [at, Math.abs(there.left - here.left)];
    }
    return best;
  }

  #hovered(event) {
    const at = event.pointerType === "mouse" ? this.#indexOf(event.target) : -1;
    this.#peek.hidden = at < 0;
    if (at < 0) return;
    this.#peek.textContent = this.#said(this.#tokens[at]);
    const box = event.target.closest("[role=option]").getClientRects()[0];
    this.#peek.style.setProperty("--x", `${Math.max(8, Math.min(box.left, innerWidth - 340))}px`);
    this.#peek.style.setProperty("--y", `${box.top}px`);
  }
}
