import { defineConfig } from "vite";

// Names without hashes: the built files are committed, and a change should show as one.
export default defineConfig({
  base: "./",
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
