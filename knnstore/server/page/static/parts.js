// What an answer of /v1/explain says, as it is shown: shares, parts and effects of documents.

// Where the store's share is asked for: all that neither model nor cache gives.
const OF_STORE = ["keys", "n-grams"];

export function shareOf(token, name) {
  const wanted = name === "store" ? OF_STORE : [name];
  const given = token.parts.filter((part) => wanted.includes(part.name)).reduce((sum, part) => sum + part.weight * part.p, 0);
  return token.p > 0 ? Math.min(1, given / token.p) : 0;
}

// What a text can be colored by; of a store with one part alone the part is the store.
export function namesOf(tokens) {
  const names = [...new Set(tokens.flatMap((token) => token.parts.map((part) => part.name)))];
  const ofStore = names.filter((name) => OF_STORE.includes(name));
  return ["store", ...names.filter((name) => ofStore.length > 1 || !ofStore.includes(name))];
}

export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

export const perplexity = (probabilities) => Math.exp(-mean(probabilities.map((p) => Math.log(Math.max(p, 1e-30)))));

// The effect of a document on a token, null where it is below one per cent.
export function withoutDocument(document, position) {
  const at = document?.positions.indexOf(position) ?? -1;
  return at < 0 ? null : document.p_without[at];
}

export const isSame = (one, other) => one.domain === other.domain && one.document === other.document;
