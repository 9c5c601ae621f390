// The playground: a conversation with the served model, streamed.

class Chat {
  #messages = [];
  #running = null;
  #list = byId("chat");
  #model = null;

  /** `needKey` is called where the server wants a key. */
  constructor(needKey) {
    this.needKey = needKey;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("chat-form").requestSubmit();
    });
    byId("send").addEventListener("click", (event) => this.#running && event.preventDefault());
    byId("stop").addEventListener("click", () => this.#running?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.#running?.abort();
    });
    byId("clear").addEventListener("click", () => this.#clear());
  }

  /** The name of the served model, asked for once. */
  findModel() {
    const find = async () => (await (await ask("/v1/models")).json()).data[0].id;
    this.#model ??= find().catch((error) => {
      this.#model = null;
      throw error;
    });
    return this.#model;
  }

  async #send() {
    const content = byId("message").value.trim();
    if (this.#running || !content) return;
    this.#messages.push({ role: "user", content });
    byId("message").value = "";
    this.#add("You").text.appendData(content);
    const answer = this.#add("Model");
    const running = (this.#running = new AbortController());
    this.#setRunning(true, "Answering …");
    let ending, failure;
    try {
      ending = await this.#stream(answer.text, running.signal);
    } catch (error) {
      failure = error;
      if (running.signal.aborted) ending = { mark: "stopped", status: "Stopped." };
      else if (answer.text.data) ending = { mark: "cut off", status: `The answer was cut off: ${error.message}.` };
      else ending = { mark: "no answer", status: `No answer: ${error.message}.` };
    }
    if (this.#running !== running) return; // another conversation has begun
    if (answer.text.data) this.#messages.push({ role: "assistant", content: answer.text.data });
    else {
      this.#messages.pop(); // so that the question can be asked again
      if (!byId("message").value) byId("message").value = content;
    }
    setText(answer.mark, ending.mark && `, ${ending.mark}`);
    this.#running = null;
    this.#setRunning(false, ending.status);
    if (failure instanceof KeyNeeded) this.needKey(failure.message);
  }

  /** Append the answer as it comes. Returns how it ended: a mark that it keeps, and the status, in words. */
  async #stream(node, signal) {
    const body = {
      model: await this.findModel(),
      messages: this.#messages,
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const response = await ask("/v1/chat/completions", options);
    let usage = null, reason = null;
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      this.#append(node, choice?.delta?.content ?? "");
      reason = choice?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    if (!usage) throw new Error(BROKEN);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const isCut = reason === "length";
    const counts = `${usage.completion_tokens} tokens; ${cached} of ${usage.prompt_tokens} prompt tokens were cached.`;
    return { mark: isCut ? "cut off" : "", status: `${isCut ? "Cut off at the bound of tokens." : "Done."} ${counts}` };
  }

  #append(node, text) {
    const list = this.#list;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    node.appendData(text);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  /** A new message. Returns its text node, and the element for the mark behind its head. */
  #add(who) {
    const item = document.createElement("li");
    const head = document.createElement("h3");
    const mark = document.createElement("span");
    head.append(who, mark);
    const paragraph = document.createElement("p");
    const text = document.createTextNode("");
    paragraph.append(text);
    item.append(head, paragraph);
    this.#list.append(item);
    this.#list.scrollTop = this.#list.scrollHeight;
    return { text, mark };
  }

  #clear() {
    this.#running?.abort();
    this.#running = null;
    this.#messages = [];
    this.#list.replaceChildren();
    this.#setRunning(false, "");
    byId("message").focus();
  }

  #setRunning(isRunning, status) {
    byId("send").setAttribute("aria-disabled", isRunning); // not `disabled`, which would take the focus away
    if (!isRunning && document.activeElement === byId("stop")) byId("message").focus();
    byId("stop").disabled = !isRunning;
    setText("chat-status", status);
  }
}
