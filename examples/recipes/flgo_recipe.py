"""A server of FLGo, with clients selected by fedcor."""

import tempfile

import flgo
import flgo.algorithm.fedbase as fedbase
import flgo.benchmark.synthetic_regression as synthetic

import fedcor

SELECTOR = None  # the default; or "fedcor", "power_of_choice", fedcor.Oort(4), ...


class Server(fedbase.BasicServer):
    def initialize(self):
        sizes, many = [client.datavol for client in self.clients], self.clients_per_round
        model = self.model.state_dict()
        self.rounds = fedcor.Rounds(SELECTOR, model, sizes=sizes, clients_per_round=many)

    def iterate(self):
        rounds, number = self.rounds, self.rounds.number
        while rounds.number == number:
            question = rounds.ask(self.available_clients)
            self.model.load_state_dict(question.model)  # which is sent to clients
            if question.kind == "losses":
                scores = {k: self.clients[k].test(self.model, "train") for k in question.clients}
                rounds.tell(question, losses={k: score["loss"] for k, score in scores.items()})
            else:
                models = self.communicate(list(question.clients))["model"]
                sent = zip(self.received_clients, models, strict=True)
                rounds.tell(question, models={k: model.state_dict() for k, model in sent})
        self.model.load_state_dict(rounds.model)


class Selected:
    """An algorithm of FLGo: its server and its clients."""

    Server, Client = Server, fedbase.BasicClient


with tempfile.TemporaryDirectory() as folder:
    parameters = {"alpha": 1.0, "beta": 1.0, "num_clients": 20, "mean_datavol": 100}
    task = {"benchmark": {"name": synthetic, "para": parameters}}
    flgo.gen_task(task, f"{folder}/task")
    option = {"num_rounds": 20, "num_steps": 10, "proportion": 0.2, "no_log_console": True}
    server = flgo.init(f"{folder}/task", Selected, option)
    server.run()
    print(f"accuracy {server.test()['accuracy']:.3f}")
