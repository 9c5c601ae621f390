// Puts the parts together.

const maps = new PoolMaps(), tiles = new Tiles(), tree = new PrefixTree(), link = new Link();
const requests = new RequestTable((id) => watch.start(id));
const keyForm = new KeyForm(() => watch.start());
const chat = new Chat((message) => askForKey(message));
const watch = new Watch(show, { live: isLive, lost: (why, delay) => link.lost(why, delay), key: askForKey });

function show(pool) {
  reveal(true);
  maps.show(pool);
  tiles.show(pool);
  tree.show(pool.map.tree);
  requests.show(pool.map);
  chat.findModel().then((name) => setText("model", name), () => {});
}

/** Only what makes sense: before the first event there is nothing to show, and without a key nothing to ask. */
function reveal(hasData = !byId("pool").hidden) {
  byId("tiles").hidden = byId("pool").hidden = !hasData;
  byId("before").hidden = hasData || keyForm.isOpen;
  byId("playground").hidden = keyForm.isOpen && !hasData;
}

function isLive() {
  link.live();
  keyForm.close();
}

function askForKey(message) {
  watch.stop(); // a stream that began with a good key may go on
  link.keyNeeded();
  keyForm.ask(message);
  reveal();
}

// Nobody looks at a hidden tab, so it costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) watch.stop();
  else if (!keyForm.isOpen) watch.start();
  link.tick();
});
watch.start();
