// Pictures and videos that a message will have: chosen, dropped or pasted.
import { button, h } from "./dom.js";

const LARGEST_SIDE = 1536; // pixels of a picture, which is made smaller before it is sent

/** The attached parts, in the API's form, and their element. */
export class Attachments {
  constructor() {
    this.parts = [];
    this.element = h("div", { class: "shots" });
  }

  set(parts) {
    this.parts = parts;
    this.element.replaceChildren(...parts.map((part, at) => h("figure", {},
      part.type === "image_url" ? h("img", { src: part.image_url.url, alt: "attached picture" }) : h("p", {}, "video"),
      button("Remove", () => this.set(parts.filter((_, other) => other !== at))))));
  }

  /** Takes pictures and videos among files; the event that brought some needs no other treatment. */
  async take(files, event) {
    const media = [...files].filter((file) => /^(image|video)\//.test(file.type));
    if (media.length) event?.preventDefault();
    for (const file of media) {
      const part = file.type.startsWith("image/")
        ? { type: "image_url", image_url: { url: await smaller(file) } }
        : { type: "video_url", video_url: { url: await dataUrl(file) } };
      this.set([...this.parts, part]);
    }
  }
}

/** The picture as a data URL, at most LARGEST_SIDE wide and high. */
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1) return dataUrl(file);
  const canvas = h("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/png" ? "image/png" : "image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
