// What stands beside the text: all documents, one token, or one document.

import { count, h, label, named, oneLine, percent, probability, visible } from "./dom.js";
import { isSame, shareOf, withoutDocument } from "./parts.js";

const LISTED = 100;
const QUOTED = 4000; // characters

export function overview(documents, open) {
  const best = Math.max(...documents.map((one) => Math.abs(one.gain)), 1e-9);
  const rows = documents.slice(0, LISTED).map((one) =>
    h("li", {}, h("button", { type: "button", class: "row", onclick: () => open(one) },
      name(one),
      h("span", { class: "meter" }, h("span", { class: one.gain < 0 ? "bar harm" : "bar", "--w": Math.abs(one.gain) / best })),
      h("span", { class: "note" }, `${signed(one.gain)} nats, ${named(one.positions.length, "token")}`))));
  return [
    h("h2", {}, "Documents"),
    h("p", { class: "note" }, documents.length
      ? `${named(documents.length, "document")} changed a token’s probability by more than 1 %. Those that helped most come first.`
      : "No document changed a token’s probability by more than 1 %."),
    h("ol", { class: "rows" }, rows),
  ];
}

export function ofToken(token, total, documents, open) {
  const factor = token.p / Math.max(token.p_lm, 1e-30);
  const list = (sources) => h("ol", { class: "sources" }, sources.map((one) => ofSource(one, token, documents, open)));
  const others = token.neighbors.filter((source) => source.token !== token.token);
  return [
    h("h2", { class: "quoted", dir: "auto" }, label(token.text)),
    h("p", { class: "note" }, `token ${count(token.position + 1)}${total ? ` of ${count(total)}` : ""}`),
    h("p", { class: "figure" }, h("strong", {}, probability(token.p)),
      h("span", { class: "note" }, ` model alone ${probability(token.p_lm)}, × ${factor >= 10 ? count(Math.round(factor)) : factor.toFixed(2)}`)),
    stack(token),
    parts(token),
    h("h3", {}, "What gave it most"),
    token.causes.length ? list(token.causes) : h("p", { class: "note" }, "Nothing that was retrieved goes on with this token."),
    others.length > 0 && h("h3", {}, "What else was near"),
    others.length > 0 && list(others),
  ];
}

export function ofDocument(effect, tokens, choose) {
  const changes = effect.positions
    .map((position, at) => ({ token: tokens.find((one) => one.position === position), without: effect.p_without[at] }))
    .filter((one) => one.token)
    .map((one) => ({ ...one, change: Math.log(Math.max(one.token.p, 1e-30) / Math.max(one.without, 1e-30)) }))
    .sort((one, other) => other.change - one.change);
  const helped = changes.filter((one) => one.change > 0).length;
  const rows = changes.slice(0, LISTED).map(({ token, without, change }) =>
    h("li", {}, h("button", { type: "button", class: "row change", onclick: () => choose(token) },
      h("span", { class: "quoted" }, label(token.text)),
      h("span", { class: change < 0 ? "note harm" : "note" }, `${probability(without)} → ${probability(token.p)}`))));
  return [
    h("h2", {}, name(effect)),
    h("p", { class: "note" },
      `It helped ${named(helped, "token")} and harmed ${count(changes.length - helped)}: ${signed(effect.gain)} nats. Below, p without it → with it.`),
    h("ol", { class: "rows" }, rows),
    h("h3", {}, "Its text"),
    h("p", { id: "passage", class: "passage", dir: "auto" }, "…"),
  ];
}

export const quoted = (text) => visible(text.length > QUOTED ? `${text.slice(0, QUOTED)} …` : text);

function stack(token) {
  const said = token.parts.map((part) => `${part.name} ${percent(shareOf(token, part.name))}`).join(", ");
  return h("div", { class: "stack", role: "img", "aria-label": said },
    token.parts.map((part) => h("span", { "data-part": part.name, "--w": shareOf(token, part.name) })));
}

function parts(token) {
  const rows = token.parts.map((part) => h("tr", {},
    h("th", { scope: "row" }, h("i", { class: "swatch", "data-part": part.name }), part.name),
    h("td", {}, part.weight.toFixed(2)), h("td", {}, probability(part.p)), h("td", {}, percent(shareOf(token, part.name)))));
  const heads = ["", "weight", "p", "share"].map((title) => h("th", { scope: "col" }, title));
  return h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows));
}

function ofSource(source, token, documents, open) {
  const effect = documents.find((one) => isSame(one, source));
  const without = withoutDocument(effect, token.position);
  const how = source.distance === null ? `${named(source.matched, "token")} matched` : `distance ${Number(source.distance.toPrecision(3))}`;
  const effectSaid = without === null ? "without the document about the same" : `without the document p ${probability(without)}`;
  const isHit = source.token === token.token;
  const gave = isHit ? `${percent((token.lambda * source.share) / (token.p || 1))} of its p` : `${percent(source.share)} of what was retrieved`;
  const [, space, word] = oneLine(source.text).match(/^(\s*)(.*)$/);
  return h("li", { class: isHit ? "hit" : "" },
    h("p", { class: "passage", dir: "auto" },
      oneLine(source.context), space, h("mark", { "data-part": source.part }, word || "↵"), oneLine(source.continuation)),
    source.domain
      ? h("button", { type: "button", class: "link", disabled: !effect, onclick: () => open(effect) }, name(source))
      : h("span", { class: "link" }, "this text"),
    h("p", { class: "note" }, `${gave}, by ${source.part}, ${how}${source.domain ? `; ${effectSaid}` : ""}`));
}

// Isolated, so that no direction of writing reaches beyond it.
const name = (one) => h("bdi", { class: "name" }, h("span", { class: "domain" }, oneLine(one.domain)), ` ${oneLine(one.document)}`);

const signed = (number) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`;
