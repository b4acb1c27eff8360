#pragma once

#include <cstdint>
#include <vector>

#include "core/hot_entries.h"

namespace swarm_kv {

// Likely neighbours of a signature without a scan: a locality-sensitive hashing forest. Each tree
// hashes the queries anew; the least hash over the set bits of a signature agrees for two
// signatures with a probability equal to their Jaccard similarity. A tree holds the slots in the
// order of a tuple of such min-hashes, so that the more similar two signatures are, the nearer they
// are likely to stand in some tree.
//
// Memory 8 bytes per slot and tree; 16 more per slot while it is built. Depends on `seed`
// and not on the number of threads.
class SignatureForest {
 public:
  SignatureForest(const HotEntries& hot, int64_t trees, uint64_t seed);

  // Sets `neighbours` to the slots in `range` that are within `reach` of `slot` on either side in
  // some tree, each once. Those that `full` [slots] marks are passed over.
  void neighbours(int32_t slot, int64_t reach, Range range, const std::vector<bool>& full,
                  std::vector<int32_t>& neighbours) const;

 private:
  struct Tree {
    std::vector<int32_t> order;     // slots
    std::vector<int32_t> position;  // of each slot in `order`
  };

  std::vector<Tree> trees_;
};

}  // namespace swarm_kv
