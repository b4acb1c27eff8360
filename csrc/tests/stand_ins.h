#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace swarm_kv {

// Loads a library, so that whoever asks for its soname from now on gets it.
inline void* load_stand_in(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  EXPECT_NE(library, nullptr) << dlerror();
  return library;
}

// The function or variable `name` of a stand-in.
template <typename Symbol>
Symbol* symbol_of(void* library, const char* name) {
  auto* symbol = reinterpret_cast<Symbol*>(dlsym(library, name));
  EXPECT_NE(symbol, nullptr) << name;
  return symbol;
}

}  // namespace swarm_kv
