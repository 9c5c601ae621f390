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
    byId("stop").addEventListener("click", () => this.#running?.abort());
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
    this.#add("You").appendData(content);
    const answer = this.#add("Model");
    const running = (this.#running = new AbortController());
    this.#setRunning(true, "Answering …");
    let ending;
    try {
      ending = await this.#stream(answer, running.signal);
    } catch (error) {
      if (running.signal.aborted) ending = "Stopped.";
      else ending = `The answer failed: ${error.message}`;
      if (error instanceof KeyNeeded) this.needKey(error.message);
    }
    if (this.#running !== running) return; // another conversation has begun
    if (answer.data) this.#messages.push({ role: "assistant", content: answer.data });
    else this.#messages.pop(); // so that the question can be asked again
    this.#running = null;
    this.#setRunning(false, ending);
  }

  /** Append the answer as it comes. Returns how it ended, in words. */
  async #stream(answer, signal) {
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
      this.#append(answer, choice?.delta?.content ?? "");
      reason = choice?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    if (!usage) throw new Error("the stream ended too early");
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const ending = reason === "length" ? "Cut off at the bound of tokens." : "Done.";
    return `${ending} ${usage.completion_tokens} tokens; ${cached} of ${usage.prompt_tokens} prompt tokens were cached.`;
  }

  #append(answer, text) {
    const list = this.#list;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    answer.appendData(text);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  /** A new message. Returns its text node. */
  #add(who) {
    const item = document.createElement("li");
    const head = document.createElement("h3");
    head.textContent = who;
    const paragraph = document.createElement("p");
    const text = document.createTextNode("");
    paragraph.append(text);
    item.append(head, paragraph);
    this.#list.append(item);
    this.#list.scrollTop = this.#list.scrollHeight;
    return text;
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
    byId("send").disabled = isRunning;
    byId("stop").disabled = !isRunning;
    setText("chat-status", status);
  }
}
