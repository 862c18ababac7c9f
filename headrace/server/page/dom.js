// Elements without markup: text is always text, so that nothing a model writes can become a part of the page.

/** Makes an element. A property `onclick` is a listener, `class` the class, others are properties or attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === false || value === null || value === undefined) continue;
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button with a name for screen readers. */
export function button(label, onclick, props = {}) {
  return h("button", { type: "button", onclick, ...props }, label);
}

/** A line of numbers as a picture. */
export function sparkline(numbers) {
  const NS = "http" + "://www.w3.org/2000/svg"; // a name, which nobody fetches
  const svg = document.createElementNS(NS, "svg");
  const line = document.createElementNS(NS, "polyline");
  const most = Math.max(...numbers, 1e-9);
  const points = numbers.map((y, x) => `${(x * 100) / Math.max(1, numbers.length - 1)},${19 - (y / most) * 18}`);
  line.setAttribute("points", points.join(" "));
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}
