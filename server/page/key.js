// Asks for a key where the server wants one. It stays in the tab.

class KeyForm {
  #form = byId("key-form");
  #before = null; // what had the focus

  /** `use` is called where a key has been given. */
  constructor(use) {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY_NAME, byId("key").value.trim());
      byId("key").value = "";
      use();
    });
    byId("forget").addEventListener("click", () => {
      sessionStorage.removeItem(KEY_NAME);
      location.reload();
    });
  }

  get isOpen() {
    return !this.#form.hidden;
  }

  /** `message`: what the server says of the key that it was given. */
  ask(message) {
    setText("key-error", savedKey() ? capital(message) : "");
    sessionStorage.removeItem(KEY_NAME);
    byId("forget").hidden = true;
    if (!this.isOpen) this.#before = document.activeElement;
    this.#form.hidden = false;
    byId("key").focus();
  }

  /** The key was accepted, or none is needed. */
  close() {
    byId("forget").hidden = !savedKey();
    if (!this.isOpen) return;
    const hasFocus = this.#form.contains(document.activeElement);
    this.#form.hidden = true;
    if (hasFocus) focusOn(this.#before, byId("title"));
  }
}
