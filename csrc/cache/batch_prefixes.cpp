#include "cache/batch_prefixes.h"

#include <algorithm>

#include "cache/tokens.h"

namespace npc {

BatchPrefixes::Shared BatchPrefixes::add(const Token* tokens, int64_t count) {
  auto shared_with = [&](const Row& row) {
    return Shared{row.number, common_prefix(row.tokens, tokens, std::min(row.count, count))};
  };
  auto is_less = [&](const Row& row) {
    int64_t common = shared_with(row).tokens;
    if (common == std::min(row.count, count)) return row.count < count;
    return row.tokens[common] < tokens[common];
  };
  auto place = std::partition_point(sorted_.begin(), sorted_.end(), is_less);
  Shared best;
  if (place != sorted_.end()) best = shared_with(*place);
  if (place != sorted_.begin()) {
    Shared below = shared_with(*(place - 1));
    if (below.tokens > best.tokens) best = below;
  }
  sorted_.insert(place, Row{tokens, count, sorted_.size()});
  return best;
}

}  // namespace npc
