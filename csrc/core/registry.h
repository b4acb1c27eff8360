#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/error.h"

namespace swarm_kv {

template <typename Base>
using Registration = std::pair<std::string, std::function<std::unique_ptr<Base>()>>;

template <typename Base, typename Strategy>
Registration<Base> registered(const std::string& name) {
  return {name, [] { return std::make_unique<Strategy>(); }};
}

// The strategies of one stage by name: a new strategy is one class and one line in its stage's
// list.
template <typename Base>
class Registry {
 public:
  Registry(std::string stage, std::vector<Registration<Base>> strategies)
      : stage_(std::move(stage)), strategies_(std::move(strategies)) {}

  // Throws Error(kArgument) that lists the known names.
  std::unique_ptr<Base> make(const std::string& name) const {
    std::string known;
    for (const auto& [candidate, factory] : strategies_) {
      if (candidate == name) return factory();
      known += (known.empty() ? "" : ", ") + candidate;
    }
    throw Error(ErrorKind::kArgument,
                "unknown `" + stage_ + "` \"" + name + "\"; choose one of: " + known);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& strategy : strategies_) names.push_back(strategy.first);
    return names;
  }

 private:
  std::string stage_;
  std::vector<Registration<Base>> strategies_;
};

}  // namespace swarm_kv
