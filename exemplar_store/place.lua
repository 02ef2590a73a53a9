-- Shared by every script that files an exemplar: into its bucket, exactly once.
-- An entry is 'seq|bucket|micro-score|packed exemplar': what its removal must subtract stands in it.

local function parse(entry)
  local seq, bucket, micro = string.match(entry, '^(%d+)|(%-?%d+)|(%-?%d+)|')
  return tonumber(seq), bucket, micro
end

local function add(stats, shelf, bucket, count, micro)
  local field = shelf .. '|' .. bucket .. '|'
  redis.call('HINCRBY', stats, field .. 's', micro)
  local now = redis.call('HINCRBY', stats, field .. 'n', count)
  if now <= 0 then redis.call('HDEL', stats, field .. 'n', field .. 's') end
  return now
end

local function remove(exemplars, scores, stats, shelf, id, entry)
  local _, bucket, micro = parse(entry)
  add(stats, shelf, bucket, -1, string.format('%d', -tonumber(micro)))
  redis.call('ZREM', scores, id)
  redis.call('HDEL', exemplars, id)
end

-- Cuts a bucket to its best, its newest and the lowest ids. An id is a hash, so the lowest ones are a uniform sample
-- of all that ever arrived, and the same one whatever the order of arrival.
local function cut(exemplars, scores, stats, pins, shelf, low, high, caps)
  local ids = redis.call('ZRANGEBYSCORE', scores, low, high)
  local keep, entries, seqs, order = {}, {}, {}, {}
  for rank, id in ipairs(ids) do
    entries[id] = redis.call('HGET', exemplars, id)
    seqs[id] = parse(entries[id])
    order[rank] = id
    if rank > #ids - caps[1] then keep[id] = true end
  end
  table.sort(order, function(a, b) return seqs[a] > seqs[b] end)
  for rank = 1, math.min(caps[2], #order) do keep[order[rank]] = true end
  table.sort(order)
  for rank = 1, math.min(caps[3], #order) do keep[order[rank]] = true end
  local gone = 0
  for _, id in ipairs(ids) do
    if not keep[id] and redis.call('HEXISTS', pins, shelf .. '|' .. id) == 0 then
      remove(exemplars, scores, stats, shelf, id, entries[id])
      gone = gone + 1
    end
  end
  return gone
end

-- `filing` is one word each: shelf, id, speedup, micro-score, bucket, low, high, replace, cap best, newest, random.
-- Answers new (1 or 0), the bucket the exemplar is in, how many the caps removed.
local function place(exemplars, scores, stats, pins, filing, packed)
  local a = {}
  for word in string.gmatch(filing, '%S+') do a[#a + 1] = word end
  local shelf, id, micro, bucket = a[1], a[2], a[4], a[5]
  local known = redis.call('HGET', exemplars, id)
  if known and a[8] ~= '1' then
    local _, stands = parse(known)
    return 0, stands, 0
  end
  -- The first write is one that a server without memory refuses: nothing has changed then.
  local seq = redis.call('HINCRBY', stats, 'seq', 1)
  if known then remove(exemplars, scores, stats, shelf, id, known) end
  redis.call('HSET', exemplars, id, seq .. '|' .. bucket .. '|' .. micro .. '|' .. packed)
  redis.call('ZADD', scores, a[3], id)
  local count = add(stats, shelf, bucket, 1, micro)
  local caps = {tonumber(a[9]), tonumber(a[10]), tonumber(a[11])}
  local limit = caps[1] + caps[2] + caps[3]
  local gone = 0
  if limit > 0 and count > limit * 1.25 then
    gone = cut(exemplars, scores, stats, pins, shelf, a[6], a[7], caps)
  end
  return known and 0 or 1, bucket, gone
end
