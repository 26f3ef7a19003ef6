// The page: asks, and shows what comes.

import { ApiError, call, useKey, written } from "./api.js";
import { Controls } from "./controls.js";
import { ofDocument, ofToken, overview, quoted } from "./details.js";
import { byId, h, named, percent } from "./dom.js";
import { isSame, mean, namesOf, perplexity, shareOf } from "./parts.js";
import { TokenView } from "./tokens.js";

const PAUSE = 120; // milliseconds between a movement and the question
const SOURCES = 6;
const SOURCES_OF_LONG = 2; // for each token of a text of more than so many characters
const LONG = 3000;

const text = byId("text");
const view = new TokenView(byId("tokens"), byId("peek"), chooseToken);
let model, controls;
let answer = null; // the last one of /v1/explain
let prompt = ""; // what stood before the model wrote
let by = "store";
let chosen = {}; // a token's position, a document, or nothing
let asking = null, writing = null, waiting = 0;

// -- asking

async function start() {
  try {
    say("Loading …");
    const [models, domains] = await Promise.all([call("GET", "/v1/models"), call("GET", "/v1/domains")]);
    byId("access").hidden = true;
    model = models.data[0].id;
    byId("model").replaceChildren(h("bdi", {}, model));
    controls = new Controls(byId("controls"), () => later(explain));
    controls.offer(domains.data);
    byId("ask").hidden = byId("controls").hidden = false;
    say("");
    text.focus();
  } catch (error) {
    failed(error);
    if (error.status === 503 || error.status === 0) setTimeout(start, 1000);
  }
}

function body(more) {
  const { domains, knn } = controls.chosen;
  const names = [model, ...domains.map((name) => name.replaceAll("%", "%25").replaceAll("+", "%2B"))];
  return { model: names.join("+"), ...(Object.keys(knn).length ? { knn } : {}), ...more };
}

async function explain() {
  clearTimeout(waiting);
  asking?.abort();
  say("");
  if (!text.value) {
    byId("shown").hidden = byId("panel").hidden = true;
    return;
  }
  const mine = (asking = new AbortController());
  byId("shown").classList.add("waiting");
  try {
    const neighbors = text.value.length > LONG ? SOURCES_OF_LONG : SOURCES;
    const found = await call("POST", "/v1/explain", body({ text: text.value, neighbors }), mine.signal);
    answer = found;
    show();
  } catch (error) {
    if (error.name !== "AbortError") failed(error);
  } finally {
    if (mine === asking) byId("shown").classList.remove("waiting");
  }
}

async function continueText() {
  if (writing) return writing.abort();
  if (![text, byId("length"), byId("sampling")].every((field) => field.reportValidity())) return;
  clearTimeout(waiting);
  say("");
  lock((writing = new AbortController()));
  prompt = text.value;
  try {
    const asked = body({ prompt, max_tokens: byId("length").valueAsNumber, temperature: byId("sampling").valueAsNumber });
    for await (const piece of written(asked, writing.signal)) {
      text.value += piece;
      grow();
    }
  } catch (error) {
    if (error.name !== "AbortError") return failed(error); // which an explanation would wipe away
  } finally {
    lock((writing = null));
  }
  await explain();
}

// While the model writes, nobody else does.
function lock(isWriting) {
  byId("continue").textContent = isWriting ? "Stop" : "Continue";
  text.readOnly = byId("explain").disabled = Boolean(isWriting);
}

function later(work) {
  clearTimeout(waiting);
  waiting = setTimeout(work, PAUSE);
}

// -- showing

function show() {
  const tokens = answer.data;
  byId("shown").hidden = byId("panel").hidden = false;
  if (!view.show(tokens, firstWritten(tokens))) chosen = {};
  controls.saw(answer.knn, mean(tokens.map((token) => token.lambda)));
  const [alone, mixed] = ["p_lm", "p"].map((name) => perplexity(tokens.map((token) => token[name])).toFixed(1));
  byId("summary").replaceChildren(
    h("strong", {}, mixed), " perplexity with the store, ", h("strong", {}, alone), " by the model alone ",
    h("span", { class: "note" }, `(${named(tokens.length, "token")})`));
  legend(tokens);
  view.color(by);
  details();
}

// The first token that the model wrote, if the text still begins with what stood before.
function firstWritten(tokens) {
  if (!prompt || !text.value.startsWith(prompt)) return Infinity;
  let length = 0;
  return tokens.findIndex((token) => (length += token.text.length) > prompt.length) >>> 0;
}

function legend(tokens) {
  const names = namesOf(tokens);
  if (!names.includes(by)) by = "store";
  const choices = names.map((name) => {
    const pick = () => view.color((by = name));
    const radio = h("input", { type: "radio", name: "by", value: name, checked: name === by, onchange: pick });
    const share = mean(tokens.map((token) => shareOf(token, name)));
    return h("label", {}, radio, h("i", { class: "swatch", "data-part": name }), `${name} `, h("span", { class: "note" }, percent(share)));
  });
  const focused = byId("legend").contains(document.activeElement);
  byId("legend").replaceChildren(...choices);
  if (focused) byId("legend").querySelector(":checked").focus();
}

function chooseToken(at) {
  chosen = at < 0 ? {} : { token: answer.data[at].position, document: chosen.document };
  details();
}

function chooseDocument(one) {
  chosen = { document: one };
  details();
}

function details() {
  const token = answer.data.find((one) => one.position === chosen.token);
  const effect = chosen.document && answer.documents.find((one) => isSame(one, chosen.document));
  byId("panel").classList.toggle("open", Boolean(token || effect)); // first: a token scrolls clear of it
  view.mark(effect ?? null);
  view.choose(token ? answer.data.indexOf(token) : -1);
  const back = h("button", { type: "button", class: "link back", onclick: () => (token && effect ? chooseDocument(effect) : chooseToken(-1)) },
    token && effect ? "← the document" : "← all documents");
  if (token) fill(back, ofToken(token, answer.data.at(-1).position + 1, answer.documents, chooseDocument));
  else if (effect) {
    fill(back, ofDocument(effect, answer.data, (one) => chooseToken(answer.data.indexOf(one))));
    quote(effect);
  } else fill(null, overview(answer.documents, chooseDocument));
}

function fill(back, content) {
  const hadFocus = byId("panel").contains(document.activeElement);
  byId("panel").replaceChildren(...[back, ...content].filter(Boolean));
  byId("panel").scrollTop = 0;
  if (hadFocus) byId("panel").querySelector("button")?.focus();
}

async function quote(effect) {
  const place = byId("passage");
  const asked = new URLSearchParams({ domain: effect.domain, id: effect.document, text: true });
  try {
    const found = await call("GET", `/v1/documents?${asked}`);
    place.textContent = found.data.length ? quoted(found.data[0].text) : "It was removed.";
  } catch (error) {
    place.textContent = error.message;
  }
}

function say(message, isError = false) {
  byId("status").textContent = message;
  byId("status").classList.toggle("error", isError);
}

function failed(error) {
  if (!(error instanceof ApiError)) throw error;
  const needsKey = error.status === 401 || (error.status === 403 && !controls);
  if (needsKey) {
    byId("access").hidden = false;
    byId("ask").hidden = byId("controls").hidden = true;
    byId("key").focus();
  }
  say(error.status === 503 && !model ? "The model is being loaded …" : error.message, error.status !== 503);
  if (error.status === 404) offerAgain();
}

async function offerAgain() {
  try {
    controls.offer((await call("GET", "/v1/domains")).data);
    say("A domain is not there any more. Ask again, of those that are.", true);
  } catch (error) {
    failed(error);
  }
}

function grow() {
  text.style.setProperty("--lines", Math.min(8, text.value.split("\n").length + Math.floor(text.value.length / 90)));
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  start();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (writing || !text.reportValidity()) return;
  prompt = "";
  explain();
});
byId("continue").addEventListener("click", continueText);
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("panel").addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    chooseToken(-1);
    view.focus();
  }
});
start();
