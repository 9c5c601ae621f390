// Puts the parts together, and asks for a key where one is needed.

const maps = new PoolMaps(), tiles = new Tiles(), tree = new PrefixTree();
const requests = new RequestTable((id) => watch.start(id));
const chat = new Chat((message) => askForKey(message));
const watch = new Watch(show, say);

function show(pool) {
  maps.show(pool);
  tiles.show(pool);
  tree.show(pool.map.tree);
  requests.show(pool.map);
  chat.findModel().then((name) => setText("model", name), () => {});
}

const STATES = { live: "Live", lost: "Connection lost", key: "A key is needed" };

function say(state, detail) {
  byId("link").dataset.state = state;
  setText("link-state", STATES[state]);
  setText("link-more", state === "lost" ? `trying again in ${detail} s` : "");
  if (state === "live") {
    byId("key-form").hidden = true;
    byId("forget").hidden = !savedKey();
  }
  if (state === "key") askForKey(detail);
}

function askForKey(message) {
  const isFirst = byId("key-form").hidden && !savedKey();
  byId("key-form").hidden = false;
  byId("forget").hidden = true;
  setText("key-error", isFirst ? "" : message);
  sessionStorage.removeItem(KEY_NAME);
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, byId("key").value.trim());
  byId("key").value = "";
  watch.start();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY_NAME);
  location.reload();
});
// Nobody looks at a hidden tab, so it costs the server nothing.
document.addEventListener("visibilitychange", () => (document.hidden ? watch.stop() : watch.start()));
watch.start();
