package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pingcap/kvproto/pkg/kvrpcpb"
	tikverr "github.com/tikv/client-go/v2/error"
	"github.com/tikv/client-go/v2/kv"
	"github.com/tikv/client-go/v2/txnkv"
	"github.com/tikv/client-go/v2/txnkv/transaction"
)

// txnRequest holds the arguments of all operations of transactions; each takes those it needs.
type txnRequest struct {
	Op       string   `json:"op"`
	Mode     string   `json:"mode"` // optimistic (two phases), pessimistic, async (commit), 1pc
	Keys     [][]byte `json:"keys"`
	Values   [][]byte `json:"values"` // null deletes
	Start    []byte   `json:"start"`
	End      []byte   `json:"end"`
	Limit    int      `json:"limit"`
	Reverse  bool     `json:"reverse"`
	Ts       uint64   `json:"ts"` // of reads: 0 = now
	Accounts int      `json:"accounts"`
	Workers  int      `json:"workers"`
	Count    int      `json:"count"` // transfers of each worker
}

// startingBalance is what each account has at first.
const startingBalance = 1000

func openTxn(address, keyspace string) (*txnkv.Client, error) {
	if keyspace == "" {
		return txnkv.NewClient([]string{address})
	}
	v2 := txnkv.WithAPIVersion(kvrpcpb.APIVersion_V2)
	return txnkv.NewClient([]string{address}, v2, txnkv.WithKeyspace(keyspace))
}

// serveTxn answers requests until the input ends.
func serveTxn(client *txnkv.Client) error {
	requests := json.NewDecoder(bufio.NewReaderSize(os.Stdin, 1<<20))
	answers := json.NewEncoder(os.Stdout)
	for requests.More() {
		var asked txnRequest
		if err := requests.Decode(&asked); err != nil {
			return err
		}
		given, err := performTxn(context.Background(), client, &asked)
		if err != nil {
			given = answer{"error": err.Error()}
		}
		if err := answers.Encode(given); err != nil {
			return err
		}
	}
	return nil
}

func performTxn(ctx context.Context, client *txnkv.Client, asked *txnRequest) (answer, error) {
	switch asked.Op {
	case "write":
		txn, err := begin(client, asked.Mode)
		if err != nil {
			return nil, err
		}
		if err := set(ctx, client, txn, asked); err != nil {
			return nil, err
		}
		return answer{"start_ts": txn.StartTS()}, txn.Commit(ctx)
	case "prewrite_and_die":
		return nil, prewriteAndDie(ctx, client, asked)
	case "get":
		return get(ctx, client, asked)
	case "scan":
		return scanTxn(client, asked)
	case "delete_range":
		_, err := client.DeleteRange(ctx, asked.Start, asked.End, 1)
		return answer{}, err
	case "gc":
		ts, err := client.GC(ctx, asked.Ts)
		return answer{"ts": ts}, err
	case "open_accounts":
		return answer{}, openAccounts(ctx, client, asked)
	case "transfer":
		return transfer(ctx, client, asked)
	default:
		return nil, fmt.Errorf("no such operation: %q", asked.Op)
	}
}

// begin starts a transaction whose commit takes two phases, unless the mode says otherwise.
func begin(client *txnkv.Client, mode string) (*transaction.KVTxn, error) {
	txn, err := client.Begin()
	if err != nil {
		return nil, err
	}
	txn.SetPessimistic(mode == "pessimistic")
	txn.SetEnableAsyncCommit(mode == "async")
	txn.SetEnable1PC(mode == "1pc")
	return txn, nil
}

func set(ctx context.Context, client *txnkv.Client, txn *transaction.KVTxn, asked *txnRequest) error {
	if asked.Mode == "pessimistic" {
		if err := lock(ctx, client, txn, asked.Keys...); err != nil {
			return err
		}
	}
	for i, key := range asked.Keys {
		var err error
		if asked.Values[i] == nil {
			err = txn.Delete(key)
		} else {
			err = txn.Set(key, asked.Values[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func lock(ctx context.Context, client *txnkv.Client, txn *transaction.KVTxn, keys ...[]byte) error {
	forUpdate, err := client.GetTimestamp(ctx)
	if err != nil {
		return err
	}
	return txn.LockKeys(ctx, kv.NewLockCtx(forUpdate, kv.LockAlwaysWait, time.Now()), keys...)
}

// prewriteAndDie leaves locks and neither commits nor rolls back, as a client does that is killed in between.
func prewriteAndDie(ctx context.Context, client *txnkv.Client, asked *txnRequest) error {
	txn, err := begin(client, asked.Mode)
	if err != nil {
		return err
	}
	if err := set(ctx, client, txn, asked); err != nil {
		return err
	}
	committer, err := committerOf(txn, asked.Mode)
	if err != nil {
		return err
	}
	if asked.Mode == "async" {
		committer.SetUseAsyncCommit()
	}
	if err := committer.PrewriteAllMutations(ctx); err != nil {
		return err
	}
	process, err := os.FindProcess(os.Getpid())
	if err != nil {
		return err
	}
	if err := process.Kill(); err != nil {
		return err
	}
	select {} // until the signal arrives
}

// committerOf is what Commit would use: that of the pessimistic locks, if there are any.
func committerOf(txn *transaction.KVTxn, mode string) (transaction.CommitterProbe, error) {
	probe := transaction.TxnProbe{KVTxn: txn}
	if mode != "pessimistic" {
		return probe.NewCommitter(1)
	}
	committer := probe.GetCommitter()
	return committer, committer.InitKeysAndMutations()
}

func snapshotTs(client *txnkv.Client, asked *txnRequest) (uint64, error) {
	if asked.Ts != 0 {
		return asked.Ts, nil
	}
	return client.GetTimestamp(context.Background())
}

func get(ctx context.Context, client *txnkv.Client, asked *txnRequest) (answer, error) {
	ts, err := snapshotTs(client, asked)
	if err != nil {
		return nil, err
	}
	snapshot := client.GetSnapshot(ts)
	values := make([][]byte, len(asked.Keys))
	if len(asked.Keys) > 1 {
		found, err := snapshot.BatchGet(ctx, asked.Keys)
		for i, key := range asked.Keys {
			if value, ok := found[string(key)]; ok {
				values[i] = value
			}
		}
		return answer{"values": values}, err
	}
	value, err := snapshot.Get(ctx, asked.Keys[0])
	if tikverr.IsErrNotFound(err) {
		return answer{"values": values}, nil
	}
	return answer{"values": [][]byte{value}}, err
}

func scanTxn(client *txnkv.Client, asked *txnRequest) (answer, error) {
	ts, err := snapshotTs(client, asked)
	if err != nil {
		return nil, err
	}
	snapshot := client.GetSnapshot(ts)
	var iterator interface {
		Valid() bool
		Key() []byte
		Value() []byte
		Next() error
	}
	if asked.Reverse {
		iterator, err = snapshot.IterReverse(asked.End)
	} else {
		iterator, err = snapshot.Iter(asked.Start, asked.End)
	}
	keys, values := [][]byte{}, [][]byte{}
	for err == nil && iterator.Valid() && len(keys) < asked.Limit {
		if asked.Reverse && string(iterator.Key()) < string(asked.Start) {
			break
		}
		keys, values = append(keys, iterator.Key()), append(values, iterator.Value())
		err = iterator.Next()
	}
	return answer{"keys": keys, "values": values}, err
}

// -- bank -------------------------------------------------------------------------------------------------------

func account(number int) []byte {
	return []byte(fmt.Sprintf("account/%04d", number))
}

func openAccounts(ctx context.Context, client *txnkv.Client, asked *txnRequest) error {
	txn, err := client.Begin()
	if err != nil {
		return err
	}
	for number := 0; number < asked.Accounts; number++ {
		if err := txn.Set(account(number), binary.BigEndian.AppendUint64(nil, startingBalance)); err != nil {
			return err
		}
	}
	return txn.Commit(ctx)
}

// transfer moves money between random accounts in concurrent transactions, while others add up all accounts again and again.
func transfer(ctx context.Context, client *txnkv.Client, asked *txnRequest) (answer, error) {
	var committed, conflicts, sums atomic.Int64
	var group sync.WaitGroup
	failures := make(chan error, asked.Workers+1)
	done := make(chan struct{})
	for worker := 0; worker < asked.Workers; worker++ {
		group.Add(1)
		go func(seed int64) {
			defer group.Done()
			chance := rand.New(rand.NewSource(seed))
			for i := 0; i < asked.Count; {
				switch err := transferOnce(ctx, client, asked, chance); {
				case err == nil:
					committed.Add(1)
					i++
				case isConflict(err):
					conflicts.Add(1)
				default:
					failures <- err
					return
				}
			}
		}(int64(worker))
	}
	go func() {
		group.Wait()
		close(done)
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case err := <-failures:
			return nil, err
		default:
		}
		sum, err := addUp(ctx, client, asked.Accounts)
		if err != nil {
			return nil, err
		}
		if sum != int64(asked.Accounts)*startingBalance {
			return nil, fmt.Errorf("the accounts add up to %d", sum)
		}
		sums.Add(1)
	}
	select {
	case err := <-failures:
		return nil, err
	default:
	}
	return answer{"committed": committed.Load(), "conflicts": conflicts.Load(), "sums": sums.Load()}, nil
}

func isConflict(err error) bool {
	var deadlock *tikverr.ErrDeadlock
	return tikverr.IsErrWriteConflict(err) || errors.As(err, &deadlock)
}

func transferOnce(ctx context.Context, client *txnkv.Client, asked *txnRequest, chance *rand.Rand) error {
	from := chance.Intn(asked.Accounts)
	to := (from + 1 + chance.Intn(asked.Accounts-1)) % asked.Accounts
	txn, err := begin(client, asked.Mode)
	if err != nil {
		return err
	}
	defer func() {
		if txn.Valid() {
			_ = txn.Rollback()
		}
	}()
	// One after the other and in any order, so that pessimistic ones also run into deadlocks.
	for _, change := range []struct{ number, amount int }{{from, -7}, {to, 7}} {
		key := account(change.number)
		if asked.Mode == "pessimistic" {
			if err := lock(ctx, client, txn, key); err != nil {
				return err
			}
		}
		balance, err := read(ctx, client, txn, asked.Mode, key)
		if err != nil {
			return err
		}
		changed := binary.BigEndian.AppendUint64(nil, uint64(int64(balance)+int64(change.amount)))
		if err := txn.Set(key, changed); err != nil {
			return err
		}
	}
	return txn.Commit(ctx)
}

// read takes the newest value of a key that is locked, else that of the transaction's start.
func read(ctx context.Context, client *txnkv.Client, txn *transaction.KVTxn, mode string, key []byte) (uint64, error) {
	if mode != "pessimistic" {
		value, err := txn.Get(ctx, key)
		if err != nil {
			return 0, err
		}
		return binary.BigEndian.Uint64(value), nil
	}
	ts, err := client.GetTimestamp(ctx)
	if err != nil {
		return 0, err
	}
	value, err := client.GetSnapshot(ts).Get(ctx, key)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(value), nil
}

func addUp(ctx context.Context, client *txnkv.Client, accounts int) (int64, error) {
	ts, err := client.GetTimestamp(ctx)
	if err != nil {
		return 0, err
	}
	snapshot := client.GetSnapshot(ts)
	iterator, err := snapshot.Iter(account(0), account(accounts))
	var sum int64
	for ; err == nil && iterator.Valid(); err = iterator.Next() {
		sum += int64(binary.BigEndian.Uint64(iterator.Value()))
	}
	return sum, err
}
