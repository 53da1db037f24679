import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { defineConfig } from "vite";

// The built files are committed, with the hash of the sources they were built from: tests/board/test_built.py
// sees without Node whether they are current.
const hashSources = {
  name: "hash-sources",
  generateBundle() {
    const files = ["answers.json", "index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js"];
    files.push(...readdirSync("src").map((name) => `src/${name}`).sort());
    const hash = createHash("sha256");
    for (const name of files) hash.update(`${name}\n`).update(readFileSync(name));
    this.emitFile({ type: "asset", fileName: "sources.sha256", source: `${hash.digest("hex")}\n` });
  },
};

// Names without hashes: a change should show as one.
export default defineConfig({
  base: "./",
  plugins: [hashSources],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "board.js", assetFileNames: "board[extname]", inlineDynamicImports: true },
    },
  },
  server: { proxy: { "/api": "http://127.0.0.1:7331" } },
});
