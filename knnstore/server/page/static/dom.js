// Elements and words. Whatever comes from a store goes through here, and only ever becomes text.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Characters that steer how text is shown, or that show nothing, are written visibly; but for those that
// join letters, and people of an emoji.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;
const HARMLESS = "\n\t\u200c\u200d";

export function visible(text) {
  return text.replace(HIDDEN, (char) => {
    if (HARMLESS.includes(char)) return char;
    if (char < " ") return String.fromCharCode(0x2400 + char.charCodeAt(0));
    return `‹U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
  });
}

// A token in the text; of a character in several tokens the last one has all.
export const shownToken = (text) => visible(text).replaceAll("\n", "↵\n") || "·";

// A token by itself.
export const label = (text) => visible(text).replaceAll("\n", "↵").trim() || (text ? "space" : "part of a character");

export const oneLine = (text) => visible(text).replace(/\s+/g, " ");

export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

export function probability(p) {
  if (p === 0) return "0";
  return p >= 1e-4 ? p.toPrecision(3) : p.toExponential(1);
}

export const count = (number) => number.toLocaleString("en-US");

export const named = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
